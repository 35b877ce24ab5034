"""The deployable: programs, weights and their meaning, in one signed folder or file."""

from archipel.bundle.archive import MAX_ARCHIVE_BYTES, pack, unpack
from archipel.bundle.card import (
    CardData,
    CardMetric,
    CardPrivacy,
    ModelCard,
    decode_card,
    encode_card,
    format_card,
    parse_card,
)
from archipel.bundle.development import (
    development_key,
    development_key_file,
    generate_development_key,
)
from archipel.bundle.keys import (
    decode_private_key,
    encode_private_key,
    generate_key,
    is_development_key,
    load_private_key,
    load_public_key,
    save_private_key,
    save_public_key,
)
from archipel.bundle.manifest import (
    FORMAT_VERSION,
    WEIGHTS_FILE,
    Limits,
    Lineage,
    Manifest,
    Phase,
    PrivacyPolicy,
    SelfTest,
    Statistic,
    TensorSpec,
    decode_manifest,
    encode_manifest,
)
from archipel.bundle.reader import Bundle, open_bundle
from archipel.bundle.release import Release, SignedRelease, Variant, open_release
from archipel.bundle.roles import Program, role_of
from archipel.bundle.weights import TensorPlace, read_weights, release_pages, weights_layout, write_weights
from archipel.bundle.writer import parameter_specs, write_bundle

__all__ = [
    "FORMAT_VERSION",
    "MAX_ARCHIVE_BYTES",
    "WEIGHTS_FILE",
    "Bundle",
    "CardData",
    "CardMetric",
    "CardPrivacy",
    "Limits",
    "Lineage",
    "Manifest",
    "ModelCard",
    "Phase",
    "PrivacyPolicy",
    "Program",
    "Release",
    "SelfTest",
    "SignedRelease",
    "Statistic",
    "TensorPlace",
    "TensorSpec",
    "Variant",
    "decode_card",
    "decode_manifest",
    "decode_private_key",
    "development_key",
    "development_key_file",
    "encode_card",
    "encode_manifest",
    "encode_private_key",
    "format_card",
    "generate_development_key",
    "generate_key",
    "is_development_key",
    "load_private_key",
    "load_public_key",
    "open_bundle",
    "open_release",
    "pack",
    "parameter_specs",
    "parse_card",
    "read_weights",
    "release_pages",
    "role_of",
    "save_private_key",
    "save_public_key",
    "unpack",
    "weights_layout",
    "write_bundle",
    "write_weights",
]
