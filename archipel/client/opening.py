"""Opens the folder of a device: what a kill has left is put right first, and all secrets come from one key store."""

from __future__ import annotations

from archipel.client.conditions.gate import Gate
from archipel.client.config import AgentConfig
from archipel.client.connection.identity import IdentityStore
from archipel.client.device import Device, Emit, Examples, Site, make_starter
from archipel.client.downloads.cache import Cache
from archipel.client.downloads.origins import Origins
from archipel.client.memory.decisions import DecisionBook
from archipel.client.memory.erasing import finish_erasing
from archipel.client.memory.journal import Journal
from archipel.client.memory.keystore import FileKeys, KeyStore, data_key
from archipel.client.memory.query_book import QueryBook
from archipel.client.memory.seeds import RoundSeeds
from archipel.client.memory.vault import Vault
from archipel.durable import make_folder, sweep


def open_folder(
    config: AgentConfig, keys: KeyStore | None, *, gate: Gate, examples: Examples, emit: Emit, site: Site | None
) -> Device:
    """Open the folder of `config`, which the caller has locked. `keys` None: files in it.

    Raises ClientError or SignatureError where a file in it is damaged, MissingExtraError for an engine that is missing.
    """
    keys = FileKeys(config.folder) if keys is None else keys
    # Before anything is opened: an interrupted erase may have destroyed the key of the files that are left.
    finish_erasing(config.folder, keys)
    state_folder = config.folder / "state"
    make_folder(state_folder)
    for folder in (config.folder, state_folder):  # where a kill during a write leaves a temporary file
        sweep(folder)
    secret = data_key(keys)
    vault = Vault(secret)
    return Device(
        config=config,
        identity=IdentityStore(config.folder, keys),
        journal=Journal(config.folder / "rounds", vault),
        cache=Cache(config.folder / "cache", config.max_cache_bytes, allow_development=config.allow_development),
        origins=Origins(config.folder),
        vault=vault,
        seeds=RoundSeeds(secret),
        gate=gate,
        examples=examples,
        emit=emit,
        state_folder=state_folder,
        queries=QueryBook(config.folder / "rounds"),
        decisions=DecisionBook(config.folder),
        starter=make_starter(config),
        site=site,
    )
