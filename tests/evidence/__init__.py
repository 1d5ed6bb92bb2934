"""Evidence for reported numbers: lines beside the pages, tables made from them, commands."""
