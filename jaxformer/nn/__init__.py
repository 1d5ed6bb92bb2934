"""The modules of a Transformer, as the papers write them."""
