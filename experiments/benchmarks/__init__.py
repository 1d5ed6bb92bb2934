"""How fast this library is, beside its peers in the same run."""
