"""What commands print, against text written by hand."""

from __future__ import annotations

from archipel.cli.input_output.tables import one_line, table


def test_columns_are_as_wide_as_they_must_be() -> None:
    assert table(["id", "state"], [["1", "running"], ["1234", "x"]]) == ["id    state", "1     running", "1234  x"]


def test_what_a_server_says_cannot_control_the_terminal() -> None:
    assert one_line("worse by 3 %: ünfit") == "worse by 3 %: ünfit"
    assert one_line("a\x1b[2Jb\nc\rd\u202ee") == "a?[2Jb?c?d?e"
