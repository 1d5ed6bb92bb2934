"""Small programs that use modules of jaxformer in other code, and files to copy."""
