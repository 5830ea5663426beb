"""The commands of the command line, a module each: `add_to` adds its parser, whose `command` runs it."""
