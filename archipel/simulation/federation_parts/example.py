"""A federation's file with everything that is common, as the command's help shows it."""

from __future__ import annotations

EXAMPLE = """\
rounds = 20                    # all that follows has a default but rounds, model and data
cohort = 10                    # devices drawn for each round; left out: all
dropout = 0.1                  # the share of these that leave before their update counts
privacy = "secure"             # adds up whole numbers as secure rounds do; or "plain": floating point
seed = 0                       # the same seed gives the same result

[model]
python = "model.py:make_model" # runs the code of that file; or zoo = "digits_cnn", onnx = "network.onnx",
                               # bundle = "digits.bundle" with key = ["publisher.pub"], which trains as it says itself
# [model.arguments]            # of the zoo's or your own function
# classes = 10
# [[models]]                   # in place of [model]: one of several (strategy "feddistill"), as a [model], and with
# clients = [0, 1]             # the devices that have it; left out of one: the rest, out of all: in turn

[training]                     # of a device in a round; not with a bundle
loss = "cross_entropy"         # a name, or a table: { name = "cross_entropy", label_smoothing = 0.1 }
optimizer = { name = "sgd", lr = 0.05 }
epochs = 2
batch_size = 16
# trainable = ["head.*"]       # parameters that devices train; left out: all

[strategy]                     # not with a bundle
name = "fedprox"
mu = 0.01                      # the strategy's options: docs/strategies.md

[hyperparameters]              # as a task has them
server_lr = 1.0

[data]                         # paths are relative to this file's folder
train = "train.npz"            # .npz, .csv, .parquet, .arrow or a folder of them: docs/data.md
test = "test.npz"              # or hold_out = 0.1: the share of train to test with
# or python = "data.py:load"   # returns the training data, or (training data, test data)

[partition]                    # which device has which examples
how = "dirichlet"              # or "iid", "by" with field = "person"
clients = 50                   # left out with "by": a device of each person
alpha = 0.3

# [root]                       # examples of the server's own, for aggregation = { rule = "fltrust" }
# share = 0.02                 # of the training data; or rows = [0, 7], or data = "trusted.npz"

[evaluation]                   # each device measures the model on examples of its own; left out: none does
hold_out = 0.2                 # the share of its examples that it does not train with
every = 5                      # rounds between two evaluations

[run]                          # how it runs: changes no result but for client_axis and engine, in the last digits
workers = 1                    # processes
cluster = "local"              # "ray": actors of a Ray cluster; workers = 0 is then one a core or GPU
client_axis = "auto"           # "on": many devices as one graph; "off": one after the other
engine = "onnxruntime"         # or "torch", on the machine's GPU; "torch:cuda:1", "torch:cpu"
folder = "simulation"          # keeps where the run stands; the same command goes on from there
keep_rounds = false            # true: also what the server has after each round, for `archipel insight`
test_every = 1
masks = false                  # true: really carries out secure aggregation, keys and shares and masks

[system]                       # times the rounds by a virtual clock; left out: a round has no duration
seconds_per_step = { median = 0.05, sigma = 1.0 }   # log-normal; or a number, or Pareto: { best = 0.02, alpha = 1.2 }
up = 2.5e5                     # bytes per second; devices = "trace.csv" in place of all that

[task]                         # more of a deployed task: archipel task create --from federation.toml
name = "digits"
population = "pupils"
min_cohort = 8
mode = "semi-synchronous"      # with [system] the simulation does so, too, and keeps goal, deadlines, concurrency

[tune]                         # `archipel tune` tries values of these: archipel tune --help
trials = 30
lr = { low = 0.01, high = 1.0, log = true }
"""
