"""LSTM, GRU and RNN."""

from archipel.training.cloud.ops.recurrent import native as native
