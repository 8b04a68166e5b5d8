"""Exact flows and closed forms. Nothing here trains or imports anything that does."""
