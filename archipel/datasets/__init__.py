"""Data sets: of arrays and files, batches of them, published ones. Files other than NumPy's need `archipel[data]`."""

from __future__ import annotations

from archipel.datasets.batches import Batches
from archipel.datasets.checks import checked
from archipel.datasets.dataset import ArrayDataset, Dataset, Field, Stream, Subset
from archipel.datasets.holding_out import hold_out
from archipel.datasets.label_partitions import split_labels, split_shards
from archipel.datasets.labelled import Labelled, LabelledSplits
from archipel.datasets.masked_tokens import MaskedTokens, masked_text_splits
from archipel.datasets.opening import as_dataset, open_file
from archipel.datasets.partitions import split_by, split_dirichlet, split_iid
from archipel.datasets.parts_summary import PartsSummary, describe_parts
from archipel.datasets.published.cifar10 import cifar10
from archipel.datasets.published.digits import DigitsByWriter
from archipel.datasets.published.digits_file import digits_by_writer
from archipel.datasets.published.ecg import EcgBeats, ecg_beats
from archipel.datasets.published.har import HarByPerson, HarWindows, har_by_person, har_windows
from archipel.datasets.published.mnist import fashion_mnist, mnist
from archipel.datasets.published.scenes import Scenes, SceneSplits, digits_and_clothes
from archipel.datasets.readers.arrays import open_arrays
from archipel.datasets.readers.arrow_files import open_arrow
from archipel.datasets.readers.audio import open_audio
from archipel.datasets.readers.csv_files import CsvStream, open_csv
from archipel.datasets.readers.images import open_images
from archipel.datasets.readers.parquet import open_parquet
from archipel.datasets.readers.records import write_records
from archipel.datasets.readers.text import open_lines, open_text
from archipel.datasets.reading import read_arrays
from archipel.datasets.skewed_partitions import shift_by_noise, split_power_law, split_sizes, split_sorted
from archipel.datasets.splits import WriterSplit, split_own_digits, split_writers
from archipel.datasets.summary import Summary, summarize
from archipel.datasets.text_splits import TextSplits, text_splits

__all__ = [
    "ArrayDataset",
    "Batches",
    "CsvStream",
    "Dataset",
    "DigitsByWriter",
    "EcgBeats",
    "Field",
    "HarByPerson",
    "HarWindows",
    "Labelled",
    "LabelledSplits",
    "MaskedTokens",
    "PartsSummary",
    "SceneSplits",
    "Scenes",
    "Stream",
    "Subset",
    "Summary",
    "TextSplits",
    "WriterSplit",
    "as_dataset",
    "checked",
    "cifar10",
    "describe_parts",
    "digits_and_clothes",
    "digits_by_writer",
    "ecg_beats",
    "fashion_mnist",
    "har_by_person",
    "har_windows",
    "hold_out",
    "masked_text_splits",
    "mnist",
    "open_arrays",
    "open_arrow",
    "open_audio",
    "open_csv",
    "open_file",
    "open_images",
    "open_lines",
    "open_parquet",
    "open_text",
    "read_arrays",
    "shift_by_noise",
    "split_by",
    "split_dirichlet",
    "split_iid",
    "split_labels",
    "split_own_digits",
    "split_power_law",
    "split_shards",
    "split_sizes",
    "split_sorted",
    "split_writers",
    "summarize",
    "text_splits",
    "write_records",
]
