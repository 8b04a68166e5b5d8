"""The book: runner, claims, figures, pages."""
