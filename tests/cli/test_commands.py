from __future__ import annotations

import errno
import importlib.metadata
import os
import re
import stat
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

import archipel
from archipel import bundle as b
from archipel.cli import main as cli
from archipel.lite_runtime.confinement import kernel_offers
from archipel.protocol.identity import EnrolmentToken, enrolment_request, verify_enrolment
from archipel.protocol.sealed import decode


def run(*arguments: str, code: int = 0, **environment: str) -> tuple[str, str]:
    """The installed command, as a user runs it."""
    done = subprocess.run(
        [sys.executable, "-m", "archipel", *arguments],
        capture_output=True, text=True, timeout=60, env={**os.environ, **environment}, check=False,
    )  # fmt: skip
    assert done.returncode == code, done.stderr
    return done.stdout, done.stderr


def test_help_shows_every_command_with_one_line() -> None:
    out, _ = run("--help")
    for name, (_, text) in cli.COMMANDS.items():
        assert re.search(rf"^  {name} +{re.escape(text)}$", out, re.M), name


def test_help_shows_the_commands_in_groups() -> None:
    out, _ = run("--help")
    sections = re.findall(r"^(\w+):\n((?:  \w.*\n)+)", out[out.index("Start:") :], re.M)
    assert [(title, re.findall(r"^  (\w+)", text, re.M)) for title, text in sections] == [
        ("Start", ["new", "up", "demo", "doctor", "version"]),
        ("Data", ["data"]),
        (
            "Models",
            [
                "train",
                "plan",
                "keys",
                "convert",
                "compress",
                "compare",
                "export",
                "inspect",
                "insight",
                "verify",
                "models",
            ],
        ),
        ("Devices", ["run", "fit", "bench", "slots", "device"]),
        ("Federation", ["simulate", "tune", "task", "round", "bundle", "model", "rollout"]),
        ("Operations", ["serve", "token", "population", "access", "audit"]),
    ]


def test_every_command_is_in_exactly_one_group() -> None:
    grouped = [name for names in cli.GROUPS.values() for name in names]
    assert sorted(grouped) == sorted(cli.COMMANDS)
    assert len(set(grouped)) == len(grouped)


def test_the_folder_of_a_command_is_its_group() -> None:
    folders = {name: target.partition(".")[0] for name, (target, _) in cli.COMMANDS.items()}
    assert folders == {name: title.lower() for title, names in cli.GROUPS.items() for name in names}


def loaded(name: str) -> click.Command:
    command = cli.LazyGroup.get_command(cli.archipel, click.Context(cli.archipel), name)
    assert command is not None
    return command


@pytest.mark.parametrize("name", sorted(cli.COMMANDS))
def test_each_command_has_a_help_that_teaches(name: str) -> None:
    result = CliRunner().invoke(cli.archipel, [name, "--help"])
    assert result.exit_code == 0
    command = loaded(name)
    # A sentence on what it does for the user, then an example of a call.
    first, _, rest = (command.help or "").partition("\n\n")
    assert re.match(r"[A-Z][a-z]+,? .*\.$", " ".join(first.split())), first
    assert re.search(rf"^ *archipel {name}\b", rest, re.M), rest
    for parameter in command.params:
        if isinstance(parameter, click.Option):
            assert parameter.help, parameter.name


@pytest.mark.parametrize(
    ("name", "part"),
    [
        (name, part)
        for name in sorted(cli.COMMANDS)
        if isinstance(loaded(name), click.Group)
        for part in sorted(loaded(name).commands)  # type: ignore[attr-defined]
    ],
)
def test_each_part_of_a_command_says_what_it_does(name: str, part: str) -> None:
    """And either it or its command has an example of it."""
    command = loaded(name)
    text = command.commands[part].help or ""  # type: ignore[attr-defined]
    assert re.match(r"[A-Z][a-z]+,? .*[.:]", " ".join(text.split())), text
    assert re.search(rf"^ *archipel {name} {part}\b", f"{text}\n{command.help}", re.M), text


@pytest.mark.sampled(every=3)
def test_starting_needs_no_extra() -> None:
    code = (
        "import sys; from click.testing import CliRunner; from archipel.cli.main import archipel as a;"
        "CliRunner().invoke(a, ['--help']); CliRunner().invoke(a, ['version']);"
        # The process that watches over a server's others has no database.
        "CliRunner().invoke(a, ['serve', 'start', '--help']);"
        "print([m for m in ('onnx', 'torch', 'flask', 'sqlalchemy', 'rich', 'onnxruntime') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_version() -> None:
    installed = importlib.metadata.version("archipel")
    assert run("version")[0].strip() == run("--version")[0].strip() == archipel.__version__ == installed


@pytest.mark.sampled(every=8)
def test_doctor_names_what_is_there_and_tries_what_protects(tmp_path: Path) -> None:
    (tmp_path / "device.key").touch(0o600)
    (tmp_path / "data.key").touch()
    (tmp_path / "data.key").chmod(0o644)
    out, _ = run("doctor", str(tmp_path))
    for word in ("Python", "ONNX Runtime", "CPUExecutionProvider", "PyTorch", "device (base)", "convert", "server"):
        assert word in out
    # The development environment has every extra but Ray, whose test makes an environment of its own, and the kernel
    # pack, which the tests compile for themselves.
    assert set(re.findall(r"missing: (.*)", out)) <= {"ray", "archipel-kernels"}
    offers = kernel_offers()
    for name, holds in (
        ("graphs", True), ("processes", True), ("files", offers.landlock > 0), ("sockets", offers.seccomp),
        ("scratch", True), ("trial: files", offers.landlock > 0), ("trial: sockets", offers.seccomp),
        ("trial: programs", offers.seccomp), ("device.key", True), ("data.key", False),
    ):  # fmt: skip
        assert re.search(rf"^{name} +{'yes' if holds else 'no'} +\S", out, re.MULTILINE), (name, out)
    assert f"chmod 600 {tmp_path / 'data.key'}" in out


@pytest.mark.sampled(every=3)
def test_doctor_names_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    from archipel.cli.start import doctor

    there = doctor._version
    monkeypatch.setattr(doctor, "_version", lambda name: None if name.lower() == "flask" else there(name))
    out = CliRunner().invoke(cli.archipel, ["doctor"]).output
    assert re.search(r"^server +missing: flask\n +install with: pip install 'archipel\[server\]'$", out, re.M)


@pytest.mark.parametrize(("package", "extra"), sorted(cli.EXTRAS.items()))
def test_every_optional_package_has_its_extra(package: str, extra: str) -> None:
    wanted = {"onnx_ir": "onnx-ir", "tomli_w": "tomli-w", "sklearn": "scikit-learn"}.get(package, package)
    requires = importlib.metadata.requires("archipel") or []
    assert any(re.match(rf"{wanted}\W.*extra == ['\"]{extra}['\"]", line) for line in requires)


def test_a_missing_extra_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "rich.py").write_text("raise ModuleNotFoundError(\"No module named 'rich'\", name='rich')")
    _, err = run("demo", code=1, PYTHONPATH=str(tmp_path))
    assert err.count("\n") == 1
    assert "pip install 'archipel[demo]'" in err


@pytest.mark.parametrize(
    ("error", "text", "code"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "/data/x"), "/data/x: No space left on device; free some", 1),
        (PermissionError(errno.EACCES, "Permission denied", "x.bundle"), "x.bundle: Permission denied", 1),
        (KeyboardInterrupt(), "interrupted", 130),
        (ModuleNotFoundError("No module named 'torch'", name="torch.nn"), "pip install 'archipel[cloud]'", 1),
        (click.UsageError("no such thing"), "no such thing", 2),
    ],
)
def test_errors_are_one_line(
    error: BaseException, text: str, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(cli.archipel, "main", fails)
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == code
    err = capsys.readouterr().err
    assert text in err
    assert "Traceback" not in err


def test_a_mistake_of_ours_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(cli.archipel, "main", fails)
    with pytest.raises(ZeroDivisionError):
        cli.main()


@pytest.mark.sampled(every=4)
def test_keys_and_tokens(tmp_path: Path) -> None:
    for name in ("publisher", "enrolment", "server"):
        run("keys", str(tmp_path / name))
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o600
    out, _ = run(
        "token", "--enrolment-key", str(tmp_path / "enrolment"), "--server-key", str(tmp_path / "server.pub"),
        "--publisher-key", str(tmp_path / "publisher.pub"), "--server", "https://example.org", "--population", "phones",
        "--count", "2", str(tmp_path / "tokens"),
    )  # fmt: skip
    files = [Path(line) for line in out.split()]
    assert len(files) == 2
    devices = set()
    for file in files:
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        token = decode("token", file.read_bytes(), EnrolmentToken)
        request = enrolment_request(token, b.generate_key())
        verified = verify_enrolment(
            request, b.load_public_key(tmp_path / "enrolment.pub"), b.load_public_key(tmp_path / "server.pub"), now=0
        )
        devices.add(verified.device_id)
        assert token.publisher_keys == [b.load_public_key(tmp_path / "publisher.pub")]
    assert len(devices) == 2
    _, err = run("keys", str(tmp_path / "publisher"), code=1)
    assert "never overwritten" in err


@pytest.mark.sampled(every=4)
def test_serve_says_what_is_wrong(tmp_path: Path) -> None:
    import socket

    for name in ("publisher", "enrolment"):
        b.save_public_key(b.generate_key(), tmp_path / f"{name}.pub")
    keys = ["--enrolment-key", str(tmp_path / "enrolment.pub"), "--publisher-key", str(tmp_path / "publisher.pub")]
    out, _ = run("serve", "init", str(tmp_path / "data"), *keys)
    assert "operator token" in out
    file = tmp_path / "operator.token"
    out, _ = run("serve", "init", str(tmp_path / "other"), *keys, "--token-file", str(file))
    assert file.read_text().strip() not in out
    assert len(file.read_text()) == 44
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    # Neither is made without the other.
    assert "File exists" in run("serve", "init", str(tmp_path / "third"), *keys, "--token-file", str(file), code=1)[1]
    assert not (tmp_path / "third").exists()
    another = tmp_path / "another.token"
    assert (
        "exists already" in run("serve", "init", str(tmp_path / "data"), *keys, "--token-file", str(another), code=1)[1]
    )
    assert not another.exists()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        _, err = run("serve", "start", str(tmp_path / "data"), "--port", port, code=1)
    assert err.count("\n") == 1
    assert f"port {port}: in use by another program" in err
    _, err = run("serve", "start", str(tmp_path / "nothing"), code=1)
    assert "cannot be read" in err
    assert err.count("\n") == 1


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--rounds", "0"], "--rounds"),
        (["--devices", "3"], "at least 17"),
        (["--edges", "0"], "at least 2, got 0"),
        (["--edges", "1"], "would not be hidden from the root"),
        (["--edges", "40"], "give --devices 320, or at most 4 edge servers"),
        (["--edges", "3", "--devices", "23"], "3 edge servers need 24 devices"),
        (["--devices", "100000"], "devices"),
        (["--output", "/nonexistent/folder/report.html"], "cannot be written"),
    ],
)
def test_demo_refuses_early(arguments: list[str], text: str) -> None:
    _, err = run("demo", *arguments, code=1)
    assert err.count("\n") == 1
    assert text in err


def test_a_command_that_is_misspelt() -> None:
    assert "No such command 'mdoel'. Did you mean 'model'?" in run("mdoel", code=2)[1]
    assert run("zzz", code=2)[1].rstrip().endswith("No such command 'zzz'.")


@pytest.mark.sampled(every=3)
def test_the_private_half_where_the_public_one_belongs(tmp_path: Path) -> None:
    b.save_private_key(b.generate_key(), tmp_path / "enrolment")
    key = str(tmp_path / "enrolment")
    _, err = run("serve", "init", str(tmp_path / "data"), "--enrolment-key", key, "--publisher-key", key, code=1)
    assert err == f"archipel: {key}: this is a private key; give its public half, {key}.pub\n"


def test_a_reader_that_leaves_is_no_error_to_tell() -> None:
    text = "import click, sys; from archipel.cli import main; sys.argv = ['archipel', 'x']\n"
    text += "main.archipel.get_command = lambda *_: click.Command('x', callback=lambda: click.echo('line\\n' * 9**6))\n"
    text += "main.main()"
    command = f'{sys.executable} -c "$TEXT" | head -1'
    done = subprocess.run(
        ["bash", "-c", command], env={**os.environ, "TEXT": text}, capture_output=True, text=True, check=True
    )
    assert (done.stdout, done.stderr) == ("line\n", "")
