"""Data: synthetic distributions and corpora, each with one loader."""
