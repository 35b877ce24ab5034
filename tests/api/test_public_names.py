"""The names that other people's code uses. A change here is a change for them: it belongs in CHANGELOG.md."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

import archipel

PUBLIC = {
    "archipel": "Model TrainConfig __version__ compress convert export function get_mode set_mode simulate train",
    "archipel.autodiff": "FORWARD ForwardContext RULES RuleContext checkpoint clip_gradient differentiate forward_rule "
    "gradient hessian_vector jvp keep_function linearize rule stop_gradient straight_through vjp vmap",
    "archipel.bundle": "Aggregators Bundle FORMAT_VERSION Limits Lineage MAX_ARCHIVE_BYTES Manifest Phase "
    "PrivacyPolicy Program Release SelfTest SignedRelease Statistic TensorPlace TensorSpec Variant WEIGHTS_FILE "
    "decode_manifest decode_private_key development_key development_key_file encode_manifest "
    "encode_private_key generate_development_key generate_key is_development_key load_private_key "
    "load_public_key open_bundle open_release pack parameter_specs read_weights release_pages role_of "
    "CardData CardMetric CardPrivacy ModelCard decode_card encode_card format_card parse_card save_private_key "
    "save_public_key unpack weights_layout write_bundle write_weights",
    "archipel.client": "Agent AgentConfig ConditionSettings Conditions Entry Event FileKeys KeyStore Outcome Probe "
    "data_key erase pause paused resume",
    "archipel.compression": "Comparison CompressedModel Distil DynamicInt8 Examples FineTune Float16 LowRank Measured "
    "Progress PruneChannels PruneNM PruneWeights QuantizationAware Report StaticInt8 Step WeightOnly Work compare "
    "compress load_recipe parse_recipe write_recipe",
    "archipel.converter": "Analysis Compression Histogram Mean Quantiles Signing Sum Training convert "
    "convert_variants export open_model variant_recipes",
    "archipel.datasets": "ArrayDataset Batches CsvStream Dataset DigitsByWriter EcgBeats Field HarByPerson HarWindows "
    "Labelled LabelledSplits MaskedTokens PartsSummary SceneSplits Scenes Stream Subset Summary TextSplits "
    "WriterSplit as_dataset checked cifar10 describe_parts digits_and_clothes digits_by_writer ecg_beats "
    "fashion_mnist har_by_person har_windows hold_out masked_text_splits mnist open_arrays open_arrow "
    "open_audio open_csv open_file open_images open_lines open_parquet open_text read_arrays "
    "shift_by_noise split_by split_dirichlet split_iid split_labels split_own_digits split_power_law "
    "split_shards split_sizes split_sorted split_writers summarize text_splits write_records",
    "archipel.edge": "run_uplink",
    "archipel.frontend": "function",
    "archipel.graph": "IMPORTERS Builder ImportReport Model TensorInfo check_model promote",
    "archipel.insight_page": "script scripts styles",
    "archipel.insight": "OpenSubject Page PageServer Run Subject activation_histograms compare_subjects is_run "
    "measure_times policy read_bundle read_onnx read_run read_versions render weight_histograms",
    "archipel.lite_runtime": "Choice Control DeviceState ExampleStore History IsolatedRuntime LocalUpdate ModelRuntime "
    "Profile Progress Runtime Slots choose load running_slot",
    "archipel.models": "autoencoder bc_resnet bert char_rnn cnn_1d deep_conv_lstm digits_cnn ds_cnn fedavg_cnn "
    "gpt lenet mlp mobilenet_v2 resnet18 resnet50 resnet8 transformer unet",
    "archipel.operator": "AuditEntry AuditHead BundleInfo DeviceInfo Endorsement Evaluation FaultInfo Gate Health "
    "ModelInfo NewToken OperatorClient ParticipantInfo Piece Pieces PopulationInfo PromotionInfo "
    "QuarantineInfo RevokedTokenInfo RolloutInfo RolloutRequest RoundInfo RoundMetrics RoundResult "
    "RoundStatus Sealed SearchInfo ServerInfo Stage StageEvaluation StageInfo StatisticResult "
    "SuspicionInfo TaskInfo TaskRequest TokenInfo TokenRequest VersionDetail VersionInfo "
    "VersionRequest",
    "archipel.preprocessing": "Average Cast Clip CropOrPad Frames Greyscale Layout LogMel Mfcc Normalize OneHot "
    "Preemphasis RandomFlip RandomGain RandomMask RandomNoise RandomShift Raw Resize ResizeShorter Scale Spectrogram "
    "Standardize TRANSFORMS Transform chain describe fitted from_settings load_settings put_before to_settings",
    "archipel.privacy": "AccountantName Event Gaussian Poisson Repeated least_multiplier read_events spent_epsilon "
    "write_events",
    "archipel.server": "OperatorClient Settings TaskRequest back_up copy_files create_app init_data_folder "
    "load_settings prune restore run_coordinator supervise",
    "archipel.simulation": "Aggregation Attack Bins ClientRow Clients Device DifferentialPrivacy DrawnClients "
    "Evaluation Federation ListedClients Pacing Range Result RoundRow SplitClients Spread System TuneSettings Tuning "
    "load_federation read_devices simulate split_clients tune",
    "archipel.strategies": "STRATEGIES Strategy get",
    "archipel.training": "StepRunner evaluate_graph losses mixed optimizers per_example recompute run_steps schedules "
    "step_graph transforms",
    "archipel.training.cloud": "Callback Cohort CohortUpdate Epoch TorchModule TrainConfig TrainResult Trainer "
    "prepare random_flip random_scale random_shift train with_preprocessing",
}


@pytest.mark.parametrize("module", sorted(PUBLIC))
def test_public_names(module: str) -> None:
    room = importlib.import_module(module)
    assert sorted(room.__all__) == sorted(PUBLIC[module].split())
    for name in room.__all__:
        assert getattr(room, name) is not None


def test_rooms_need_no_import_of_their_own() -> None:
    code = (
        "import archipel; print(len(archipel.datasets.digits_by_writer()) > 0, archipel.bundle.FORMAT_VERSION, "
        "archipel.training.losses.l1(), archipel.Model.__name__, archipel.convert.__name__)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out == "True 1 AbsoluteError() Model convert\n"


def test_what_is_not_there_says_so() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = archipel.nothing
    assert {"Model", "convert", "datasets", "lite_runtime"} <= set(dir(archipel))


def test_every_room_is_listed() -> None:
    import pkgutil

    rooms = {name for _, name, package in pkgutil.iter_modules(archipel.__path__) if package} - {"cli"}
    assert rooms | {"errors"} == set(archipel._ROOMS)
    assert rooms == {name.split(".")[1] for name in PUBLIC if name.count(".") == 1} | {"protocol"}


def test_importing_archipel_costs_nothing() -> None:
    code = "import sys, archipel; print([m for m in ('numpy', 'onnx', 'onnxruntime', 'torch') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
