"""Write vectors/sound.npz: mel spectrograms and MFCC of a short sound by torchaudio and librosa, in float64.

python -m venv other && other/bin/pip install torch==2.13.0 torchaudio librosa
other/bin/python tests/preprocessing/make_vectors.py
"""

from __future__ import annotations

from pathlib import Path

import librosa
import numpy as np
import torch
import torchaudio

rng = np.random.default_rng(1)
time = np.arange(2400) / 16000
sound = (9000 * np.sin(2 * np.pi * (300 * time + 4000 * time**2)) + rng.normal(0, 1500, (2, 2400))).astype(np.int16)
scaled = sound.astype(np.float64) / 32768

mel = torchaudio.transforms.MelSpectrogram(16000, n_fft=400, hop_length=160, n_mels=24).double()
decibels = torchaudio.transforms.AmplitudeToDB("power")
# With log_mels its logarithm is that of mel + 1e-6, so both are taken here.
bands = mel(torch.tensor(scaled))
cosines = torchaudio.functional.create_dct(12, 24, "ortho").double()
found = {
    "torchaudio/log_mel": decibels(bands).numpy(),
    "torchaudio/mfcc": (torch.log(bands.clamp_min(1e-6)).transpose(1, 2) @ cosines).transpose(1, 2).numpy(),
}
power = librosa.feature.melspectrogram(
    y=scaled, sr=16000, n_fft=512, win_length=400, hop_length=160, n_mels=24, fmin=50, fmax=7000, dtype=np.float64
)
found["librosa/log_mel"] = librosa.power_to_db(power, top_db=None)
found["librosa/mfcc"] = librosa.feature.mfcc(S=found["librosa/log_mel"], n_mfcc=12)
arrays = {name: array.astype(np.float32) for name, array in found.items()}
np.savez_compressed(Path(__file__).parent / "vectors" / "sound.npz", sound=sound, **arrays)
