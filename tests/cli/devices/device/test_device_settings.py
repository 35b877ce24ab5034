"""What is wrong with a device's settings is said in one line: where, what, and what may be there."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import get_type_hints

import pytest
from msgspec.structs import fields

from archipel.cli.devices.device import TEMPLATE
from archipel.client import AgentConfig
from archipel.client.conditions.probes.space import Disk
from archipel.client.settings import load_device_settings
from archipel.errors import ClientError

HERE = "FILE: "


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "device").mkdir()
    return tmp_path / "device.toml"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", HERE + "the field 'folder' is missing"),
        ('folder = ""', HERE + "folder: expected a path, got ''"),
        ("folder = ", HERE + "Invalid value (at end of document)"),
        ('folder = "device"\nthread = 1', HERE + "unknown field 'thread'; did you mean 'threads'?"),
        ('folder = "device"\nthreads = "2"', HERE + "threads: expected `int`, got `str`"),
        ('folder = "device"\nthreads = 0', HERE + "threads: expected `int` >= 1, got 0"),
        ('folder = "device"\nmax_wait = nan', HERE + "max_wait: expected a finite number, got nan"),
        ('folder = "device"\nkinds = ["spying"]', HERE + "kinds[0]: unknown value 'spying'; there are: ana"),
        ('folder = "device"\npublishers = ["abc"]', HERE + "publishers[0]: expected 64 hexadecimal digits, got 3 ch"),
        ('folder = "device"\nmax_rounds_per_day = 1000', HERE + "max_rounds_per_day: expected `int` <= 256, got 1000"),
        ('folder = "device"\nserver = "http://a.example"', HERE + "server: plain http:// to a.example, where"),
        ('folder = "device"\nmax_cache_bytes = -1', HERE + "max_cache_bytes: expected `int` >= 0, got -1"),
        ('folder = "device"\nserver = "a.example"', HERE + "server: expected a URL that starts with https:// or http://"),
        ('folder = "device"\nattributes = 3', HERE + "attributes: expected `object`, got `int`"),
        ('folder = "device"\n[attributes]\na = [1]', HERE + "attributes.a: expected `bool | float | str`, got"),
        ('folder = "device"\n[conditions]\nchargin = true', HERE + "conditions: unknown field 'chargin'; did you mean"),
        ('folder = "device"\n[conditions]\ncharging = 1', HERE + "conditions.charging: expected `bool`, got `int`"),
        ('folder = "device"\n[examples]', HERE + 'examples: set one of file = "data.npz", database = "URL" and'),
        ('folder = "device"\n[examples]\nfile = "x"\nstore = true', HERE + "examples: set one of"),
        ('folder = "device"\n[examples]\nstore = true\nmax_age = 0', HERE + "examples.max_age: expected `float` > 0"),
        ('folder = "device"\n[conditions]\nmin_battery = 101', HERE + "conditions.min_battery: expected `float` <= 10"),
        ("a = " + "[" * 5000, HERE + "nested too deeply for a file of settings"),
        ("a = " + "9" * 5000, HERE + "Exceeds the limit"),
        ('folder = "device"\nreport = ["charging"]', HERE + "report: 'charging' is not measured; [conditions] has: "),
    ],
)  # fmt: skip
def test_a_wrong_file(file: Path, text: str, said: str) -> None:
    file.write_text(text)
    with pytest.raises(ClientError) as error:
        load_device_settings(file, environment={}).prepare()
    assert str(error.value).startswith(said.replace("FILE", str(file)))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"THREDS": "1"}, "ARCHIPEL_DEVICE_THREDS: no such setting; did you mean 'ARCHIPEL_DEVICE_THREADS'?"),
        ({"ATTRIBUTES": "x"}, "ARCHIPEL_DEVICE_ATTRIBUTES: no such setting"),
        ({"THREADS": "two"}, "ARCHIPEL_DEVICE_THREADS: expected `int`, got `str`"),
        ({"THREADS": "0"}, "ARCHIPEL_DEVICE_THREADS: expected `int` >= 1, got 0"),
        ({"PATIENCE": "inf"}, "ARCHIPEL_DEVICE_PATIENCE: expected a finite number, got inf"),
        ({"PUBLISHERS": "ab,cd"}, "ARCHIPEL_DEVICE_PUBLISHERS[0]: expected 64 hexadecimal digits, got 2 characters"),
        ({"SERVER": "a.example"}, "ARCHIPEL_DEVICE_SERVER: server: expected a URL that starts with"),
        ({"CONDITIONS_HOURS": "noon"}, "ARCHIPEL_DEVICE_CONDITIONS_HOURS: hours must be windows such as"),
        ({"EXAMPLES_MAX_BYTES": "0"}, "ARCHIPEL_DEVICE_EXAMPLES_MAX_BYTES: expected `int` >= 1, got 0"),
    ],
)
def test_a_wrong_variable(file: Path, variables: dict[str, str], said: str) -> None:
    file.write_text('folder = "device"')
    with pytest.raises(ClientError) as error:
        load_device_settings(file, environment={f"ARCHIPEL_DEVICE_{name}": text for name, text in variables.items()})
    assert str(error.value).startswith(f"environment variable {said}")


def test_no_file_and_none_of_text(file: Path) -> None:
    with pytest.raises(ClientError, match=r"cannot be read \(No such file or directory\); `archipel device init`"):
        load_device_settings(file)
    file.write_bytes(b"folder = '\xff'")
    with pytest.raises(ClientError, match="no TOML, which is text in UTF-8"):
        load_device_settings(file)


def test_a_file_of_any_size(file: Path) -> None:
    file.write_bytes(b"#" * ((1 << 20) + 1))
    with pytest.raises(ClientError, match="more than 1048576 bytes, so not a file of settings"):
        load_device_settings(file)


def test_the_environment_goes_before_the_file(file: Path) -> None:
    file.write_text(
        'folder = "device"\nthreads = 2\nattempts = 2\n[conditions]\nmin_free_disk = 5\n[examples]\nstore = true'
    )
    variables = {
        "FOLDER": "/elsewhere", "THREADS": "3", "ALLOW_PLAIN": "true", "POLL_JITTER": "0.5", "CA_FILE": "ca.pem",
        "KINDS": "training,evaluation", "MAX_ROUNDS_PER_DAY": "4", "PUBLISHERS": "ab" * 32, "MAX_EPSILON": "2.5",
        "CONDITIONS_HOURS": "22:00-06:00,12:00-13:00", "EXAMPLES_STORE": "false", "EXAMPLES_FILE": "data.npz",
    }  # fmt: skip
    found = load_device_settings(
        file, environment={"HOME": "/", **{f"ARCHIPEL_DEVICE_{name}": text for name, text in variables.items()}}
    )
    config = found.config
    assert (config.folder, config.ca_file) == (Path("/elsewhere"), file.parent / "ca.pem")
    assert (config.threads, config.attempts, config.allow_plain, config.poll_jitter) == (3, 2, True, 0.5)
    assert (config.kinds, config.max_rounds_per_day) == (("training", "evaluation"), 4)
    assert (config.publishers, config.max_epsilon) == (("ab" * 32,), 2.5)
    assert (found.conditions.min_free_disk, list(found.conditions.hours)) == (5, ["22:00-06:00", "12:00-13:00"])
    assert found.examples is not None
    assert (found.examples.store, found.examples.file) == (False, str(file.parent / "data.npz"))


def test_what_is_told_is_measured_when_it_is_told(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file.write_text(
        'folder = "device"\nreport = ["disk"]\n[attributes]\nsite = "north"\n[conditions]\nmin_free_disk = 1'
    )
    config, _ = load_device_settings(file, environment={}).prepare()
    first = dict(config.attributes)
    assert first["site"] == "north"
    assert float(first["disk"]) > 0
    monkeypatch.setattr(Disk, "value", lambda self: 7.0)
    assert dict(config.attributes) == {"site": "north", "disk": 7.0}


def test_the_template_is_the_defaults(file: Path) -> None:
    """Its lines as they are, and with every `#` in front of a setting taken away: names and values are right."""
    file.write_text(TEMPLATE)
    found = load_device_settings(file, environment={})
    assert found.config == AgentConfig(folder=file.parent / "device")
    lines = [
        line.removeprefix("# ") if " = " in line and line.startswith("# ") else line for line in TEMPLATE.splitlines()
    ]
    lines = [line for line in lines if not line.startswith(("server =", "store =", "database =", "query ="))]
    file.write_text("\n".join(lines))
    said = tomllib.loads("\n".join(lines))
    everything = load_device_settings(file, environment={})
    defaults = {field.name: field.default for field in fields(AgentConfig)}
    examples = {"folder", "server", "ca_file", "client_certificate", "client_key", "attributes", "max_rounds_per_day",
                "max_epsilon"}  # fmt: skip
    shown = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in said.items()
        if name in defaults.keys() - examples
    }
    assert (everything.config.max_rounds_per_day, everything.config.max_epsilon) == (256, 8.0)
    assert len(shown) > 10
    assert shown == {name: defaults[name] for name in shown}
    assert everything.examples is not None
    assert (everything.examples.max_bytes, everything.examples.max_age) == (64 << 20, 30 * 86400.0)
    assert set(said["conditions"]) == set(get_type_hints(type(everything.conditions)))
