"""How attention learns: the library behind the book, cut by concept (see the README)."""
