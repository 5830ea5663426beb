"""The commands of the command line: `add_NAME` gives a parser the options of a command, and what runs it."""
