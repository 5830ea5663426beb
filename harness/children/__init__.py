"""Child processes: one way to start them, to ask them something, to wait for the answer, and to end them.

A `Channel` carries questions and answers. `ChildProcess` is a process of Python that was started with one; a fork
server starts kernel processes with others. `next_message` waits for an answer, and reads what a child prints meanwhile.
"""
