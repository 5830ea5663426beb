"""What a kernel process prints: bounded, escaped, and never a reason for it to wait."""

import os
import threading

from lastbit.children.child import MOST, Output


def printed(*pieces):
    """Return what is kept of a process that prints these pieces."""
    read, write = os.pipe()
    output = Output(read)
    for piece in pieces:
        os.write(write, piece)
        assert output.read()
    os.close(write)
    return output.close()


def test_text_is_kept():
    assert printed(b"one\n", "zwei ü\n".encode()) == "one\nzwei ü\n"


def test_a_character_may_come_in_two_pieces():
    assert printed(b"\xc3", b"\xbc") == "ü"


def test_commands_to_a_terminal_are_escaped():
    assert printed(b"\x1b[2J\rPASSED \x00\xff\xe2\x80\xae\n") == "\\x1b[2J\\rPASSED \\x00\\xff\\u202e\n"


def test_more_than_the_bound_is_counted_and_dropped():
    assert printed(*[b"x" * 60_000] * 30) == "x" * MOST + f"\n… and {30 * 60_000 - MOST} bytes more\n"


def test_what_is_there_at_the_end_is_read():
    read, write = os.pipe()
    output = Output(read)
    os.write(write, b"last words")
    assert output.close() == "last words"
    os.close(write)


def test_one_who_prints_without_an_end_keeps_nobody_waiting():
    read, write = os.pipe()
    output = Output(read)

    def chatter():
        try:
            while True:
                os.write(write, b"x" * 4096)
        except OSError:
            os.close(write)

    talker = threading.Thread(target=chatter)
    talker.start()
    for _ in range(100):
        assert output.read()
    assert len(output.close()) < 2 * MOST
    talker.join()
