"""`archipel device`: this machine as one device of a federation."""

from __future__ import annotations

import gc
import json
import os
import signal
import time
from pathlib import Path

import click

from archipel.cli.devices.device_examples import LocalExamples, examples
from archipel.cli.devices.device_owner import erase, pause, resume, status
from archipel.cli.devices.device_process import Log, Stop, Supervisor, fail_if_unmendable
from archipel.cli.input_output.enrolment_tokens import read_token
from archipel.client import Agent, AgentConfig
from archipel.client.rounds.exchange import LATER
from archipel.client.settings import load_device_settings
from archipel.durable import write_durably
from archipel.errors import CertificateError, CommandError, RefusedError
from archipel.protocol.identity import EnrolmentToken
from archipel.protocol.messages import TokenCertificate
from archipel.protocol.moments import moment
from archipel.protocol.sealed import unseal
from archipel.protocol.tls import client_context

_CONFIG = click.argument("config", type=click.Path(path_type=Path))


@click.group()
def device() -> None:
    """Take part in a federation with this machine, and see what it did there.

    \b
    archipel device init device.toml                 write a file of settings; read it and change it
    archipel device enroll device.toml my.token      join a federation once, with a token from its operator
    archipel device run device.toml                  check in, train, send masked updates, until stopped
    archipel device status device.toml               what the device did, sent, and spent of your privacy
    archipel device pause device.toml --for 2h       no work from now on; `resume` ends the pause
    archipel device erase device.toml                destroy its keys and everything it learned and kept

    The device runs signed graphs within the limits in the settings, and never sends examples. One process works in a
    device's folder at a time; status, pause, resume and examples may run beside it. The environment variable
    ARCHIPEL_DEVICE_NAME overrides the setting NAME, and ARCHIPEL_DEVICE_CONDITIONS_NAME a setting in [conditions].
    """


for _command in (erase, examples, pause, resume, status):
    device.add_command(_command)


@device.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option(
    "--ca",
    type=click.Path(path_type=Path),
    help="The private authority of the server's TLS certificate (PEM): tls/ca.pem of `archipel serve init --tls-name`.",
)
def init(file: Path, ca: Path | None) -> None:
    """Write FILE, a file of settings in which each setting has an explanation. FILE must not exist yet.

    \b
    archipel device init device.toml
    archipel device init device.toml --ca ca.pem
    """
    if file.exists():
        raise CommandError(f"{file}: exists already; choose another name")
    text = TEMPLATE
    if ca is not None:
        client_context(ca)  # names what is wrong with the file
        # Paths in the settings start in their file's folder.
        path = os.path.relpath(ca.absolute(), file.absolute().parent)
        text = text.replace('# ca_file = "ca.pem"  ', f"ca_file = {json.dumps(path)}  ", 1)
    write_durably(file, text.encode(), mode=0o644)
    click.echo(f"{file}: read it, then `archipel device enroll {file} TOKEN_FILE`")


@device.command()
@_CONFIG
@click.argument("token_file", type=click.Path(path_type=Path))
def enroll(config: Path, token_file: Path) -> None:
    """Join the federation that TOKEN_FILE is for. Its operator makes one token for each device with `archipel token`.

    \b
    archipel device enroll device.toml my.token

    The command makes the device's key, which never leaves the device, and pins the keys of the server and the
    publishers. The token cannot be used again. A device that is enrolled already stays as it is; one of an edge server
    moves to another edge server of the same root with a token of that one (docs/edge.md).
    """
    settings = load_device_settings(config)
    token = read_token(token_file)
    with _agent(settings.config) as agent:
        if agent.device_id and agent.is_at(token):
            click.echo(f"device {agent.device_id}: enrolled already")
            return
        try:
            device_id = agent.enrol(token)
        except CertificateError as error:
            raise CommandError(f"{token_file}: contradicts itself ({error}); ask for a new token") from None
        except RefusedError as error:
            if error.status in LATER:
                raise
            # The token's expiry only explains a refusal: the server decided by its own clock.
            expiry = _expiry(token)
            when = f"; it was for use until {expiry}" if expiry else ""
            raise CommandError(f"{token_file}: the server does not take it: {error}{when}") from None
    click.echo(
        f"device {device_id}: enrolled in population {token.population!r} at {settings.config.server or token.server}"
    )
    click.echo(f"{token_file} is used up and can be removed; `archipel device run {config}` takes part")


@device.command()
@_CONFIG
@click.option("--once", is_flag=True, help="Check in once, take part if there is a round, and exit; for cron.")
@click.option("--json", "as_json", is_flag=True, help="Write log lines as JSON, for machines.")
def run(config: Path, once: bool, as_json: bool) -> None:
    """Check in and take part in rounds until SIGTERM or Ctrl-C, which leaves a round that is under way.

    \b
    archipel device run device.toml
    archipel device run device.toml --once

    \b
    Exit codes:
      0    stopped as asked, or done with --once
      1    a failure that may pass: the server, the disk, another agent in the folder
      2    wrong usage
      78   settings, enrolment or files are wrong: starting again would not help
      130  interrupted with --once

    Under systemd (Type=notify) the agent reports that it is ready, what it is doing, and that it is alive
    (WatchdogSec=).
    """
    supervisor = Supervisor()
    log = Log(as_json, supervisor)
    stop = Stop(supervisor.beat, supervisor.beat_seconds)
    with fail_if_unmendable():
        settings = load_device_settings(config)
        agent_config, conditions = settings.prepare()
        data = LocalExamples(settings)
    with Agent(agent_config, examples=data, conditions=conditions, on_event=log) as agent, fail_if_unmendable():
        if not agent.device_id:
            raise CommandError(
                f"{agent_config.folder}: not enrolled yet; run: archipel device enroll {config} TOKEN_FILE"
            )
        # A mistake in the settings is to be an error now, not the reason for leaving a round hours later.
        data.check()
        log.line("started", {"folder": str(agent_config.folder)}, {"device": agent.device_id})
        supervisor.ready()
        if once:
            # SIGTERM ends it like Ctrl-C, with KeyboardInterrupt, so that `with` blocks are left in order.
            signal.signal(signal.SIGTERM, signal.default_int_handler)
            outcome = agent.run_once()
            reason = {"reason": outcome.reason} if outcome.reason else {}
            log.line(
                "done", {"outcome": outcome.kind, **reason}, {"device": agent.device_id, "round": outcome.round_id}
            )
            return
        stop.on_signals()
        gc.freeze()  # modules and settings stay for good: no garbage collection looks through them again
        agent.run_forever(stop)
        supervisor.stopping()
        log.line("stopped", {}, {"device": agent.device_id})


@device.command()
@_CONFIG
def rotate(config: Path) -> None:
    """Replace the device's key with a new one; its id stays. No agent may be using the folder.

    \b
    archipel device rotate device.toml
    """
    with _agent(load_device_settings(config).config) as agent:
        if not agent.rotate_key():
            raise CommandError("the device is in a round; `archipel device run` replaces its key once that is over")
        click.echo(f"device {agent.device_id}: has a new key")


def _agent(config: AgentConfig) -> Agent:
    return Agent(config, examples=dict)


def _expiry(token: EnrolmentToken) -> str:
    """When the token expired, "" if it is valid still by this machine's clock."""
    certificate = unseal("token", token.certificate, token.enrolment_key, TokenCertificate)
    return moment(certificate.not_after) if certificate.not_after < time.time() else ""


TEMPLATE = """\
# Settings of one device, for `archipel device`. Behind a # is the default of a setting, or an example where there is
# none. Paths start in this file's folder, sizes are bytes, times seconds.

# The device's own folder: its key, cache, journal, and what it learned for itself.
folder = "device"

# server = ""                       # URL; empty: the one in the enrolment token
# allow_http = false                # plain http:// also to another machine, where others may read along
# ca_file = "ca.pem"                # who certified the server's TLS certificate; else the system's authorities
# client_certificate = "me.pem"     # to show to a server that asks for one
# client_key = "me.key"             # its private key, where that is in another file

# What you allow. A round beyond it is refused before any work; docs/agent.md says what the server hears of that.
# kinds = ["training", "evaluation", "analytics"]   # of tasks
# min_cohort = 2                    # secure rounds with fewer devices than this are refused
# allow_plain = false               # rounds in which the server sees this device's update by itself
# min_contributors = 0              # devices with examples in the sum of an evaluation or analysis, at least
# max_rounds_per_day = 256          # in any 24 hours; else any number
# max_epsilon = 8.0                 # of all rounds together, for each example; else any, and without noise too
# publishers = []                   # public keys: of the publishers in the token only these
# allow_development = false         # bundles that a development key signed, which is for trying out only
# populations = []                  # to enrol in and work for; else the token's
# max_peak_bytes = 536_870_912      # memory of a model while it trains
# max_upload_bytes = 67_108_864     # of one round
# max_upload_entries = 16_777_216   # numbers in one round's update
# max_query_entries = 4096          # numbers in the answer to an evaluation or analysis
# max_download_bytes = 268_435_456  # of a bundle, and of a set of weights
# max_cache_bytes = 536_870_912     # bundles and weights on the disk
# tell_why = true                   # tell the server which kind of limit a refused round was beyond
# threads = 1
# engine = "onnxruntime"            # what runs the models; "torch" uses the GPU (pip install 'archipel[cloud]')
# isolated = true                   # models run in a child process, which the system holds to these limits (Linux)
# max_step_seconds = 300.0          # of one training step there
# starter_seconds = 60.0            # so long 25 MB stay for it after a round, which makes the next one cheaper; 0: none
# adopt = false                     # take the versions of models that the server offers; which run here is not told
# count_adoption = true             # be counted, with a noisy answer, where secure evaluations count who took a version
# look_seconds = 120.0              # no message for so long after it looked at one, whatever came of that
# max_worse = 0.05                  # by which share a version may be worse on the examples here than the one before

# How patient it is; docs/agent.md has some more of these.
# resume_within = 120.0             # so long work in a round stands still before the device leaves it
# pause_seconds = 30.0              # until conditions that did not hold are asked again
# max_offline_wait = 900.0          # until a server that could not be reached is tried again

# What the device tells about itself whenever it checks in: nothing but this, and what the probes in `report` measure.
# report = ["charging", "battery"]  # of those that [conditions] sets; min_free_disk is "disk", and so on
[attributes]
# site = "north"

# When it may work. All of them must hold; while one does not, work stands still, or the device leaves the round.
[conditions]
# charging = true
# min_battery = 30.0                # per cent
# idle = 0.5                        # threads of others that are busy, for each core: less than that
# unmetered = true                  # not while connected through a metered network
# metered_interfaces = ["wwan*", "ppp*", "rmnet*", "usb*", "bnep*"]
# hours = ["22:00-06:00"]           # local time
# max_temperature = 70.0            # degrees Celsius
# min_free_memory = 268_435_456
# min_free_disk = 1_073_741_824

# What it learns from: a file with an array for each field, a file or folder of tables (.parquet, .csv), pictures or
# sounds (pip install 'archipel[data]'), a query (pip install 'archipel[site]'), or the device's encrypted store.
[examples]
file = "data.npz"                   # or .safetensors, "patients.parquet", a folder, and so on
# database = "postgresql+psycopg://reader@localhost/ward"    # instead, with query; ARCHIPEL_DEVICE_EXAMPLES_DATABASE
# query = "SELECT age, pulse, outcome FROM stays WHERE outcome IS NOT NULL"
# fields = {features = ["age", "pulse"], label = ["outcome"]}    # the bundle's fields, and the columns of each
# classes = {outcome = ["home", "ward", "icu"]}    # the names of classes 0, 1, ... in a column of texts
# store = true                      # instead; `archipel device examples add` fills it
# max_bytes = 67_108_864            # of the store: the oldest examples go
# max_age = 2_592_000.0             # of the store: so do older ones
"""
