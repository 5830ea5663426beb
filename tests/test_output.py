"""What a kernel process prints: bounded, escaped, and never a reason for it to wait."""

import io
import os
import threading

from harness.isolation.output import MOST, Output


def logged(*pieces, prefix=""):
    """What the log has after a process has printed these pieces."""
    read, write = os.pipe()
    log = io.StringIO()
    with Output(read, log, prefix) as output:
        for piece in pieces:
            os.write(write, piece)
        os.close(write)
    return log.getvalue(), output


def test_text_is_kept():
    assert logged(b"one\n", "zwei ü\n".encode())[0] == "one\nzwei ü\n"


def test_a_character_may_come_in_two_pieces():
    assert logged(b"\xc3", b"\xbc")[0] == "ü"


def test_commands_to_a_terminal_are_escaped():
    assert logged(b"\x1b[2J\rPASSED \x00\xff\xe2\x80\xae\n")[0] == "\\x1b[2J\\rPASSED \\x00\\xff\\u202e\n"


def test_every_line_has_the_prefix():
    assert logged(b"one\ntw", b"o\n", prefix="| ")[0] == "| one\n| two\n"


def test_no_other_line_end_begins_a_line():
    assert logged("a\u2028b\x0bc\x85d\n".encode(), prefix="| ")[0].count("| ") == 1


def test_more_than_the_bound_is_counted_and_dropped():
    text, output = logged(*[b"x" * 60_000] * 30)
    assert text == "x" * MOST + f"\n… and {30 * 60_000 - MOST} bytes more\n"
    assert output.dropped == 30 * 60_000 - MOST


def test_a_log_that_cannot_be_written_keeps_nobody_waiting():
    read, write = os.pipe()
    log = io.StringIO()
    log.close()
    with Output(read, log) as output:
        for _ in range(10):
            os.write(write, b"x" * 60_000)
        os.close(write)
    assert output.kept


def test_the_end_does_not_wait_for_one_who_keeps_the_pipe():
    read, write = os.pipe()
    before = threading.active_count()
    output = Output(read, io.StringIO())
    output.close(0.05)
    os.close(write)
    output.close()
    assert threading.active_count() == before
