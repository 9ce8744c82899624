"""A tiny GPT-2 on the bytes of the standard library's sources, with Transformers' Trainer in bfloat16.

`fsdp2` as the first argument shards the model by FSDP2. The last argument is the folder of the checkpoints.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from digest import report
from sharding import choose_by_plugin
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

torch.set_num_threads(1)
set_seed(0)


class Sources(Dataset[dict[str, torch.Tensor]]):
    """Blocks of 32 bytes."""

    def __init__(self, text: bytes, pause_s: float = 0.0) -> None:
        self._blocks = torch.frombuffer(bytearray(text), dtype=torch.uint8).long().unfold(0, 32, 32)
        self._pause_s = pause_s

    def __len__(self) -> int:
        return len(self._blocks)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        time.sleep(self._pause_s)
        return {"input_ids": self._blocks[index], "labels": self._blocks[index]}


sharded: dict[str, Any] = {}
if "fsdp2" in sys.argv:
    choose_by_plugin()
    sharded = {"fsdp": True, "fsdp_config": {"version": 2}, "accelerator_config": {"use_configured_state": True}}
trainer: Any = Trainer(
    model=GPT2LMHeadModel(GPT2Config(vocab_size=256, n_positions=32, n_embd=48, n_layer=2, n_head=2)),
    args=TrainingArguments(
        sys.argv[-1],
        per_device_train_batch_size=8,
        per_device_eval_batch_size=8,
        gradient_accumulation_steps=2,
        max_steps=12,
        eval_strategy="steps",
        eval_steps=4,
        save_steps=4,
        logging_steps=4,
        bf16=True,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        **sharded,
    ),
    train_dataset=Sources(Path(argparse.__file__).read_bytes()),
    eval_dataset=Sources(Path(json.__file__).read_bytes()[:1024], pause_s=0.8 / 32),
)
trainer.train()
report(trainer.args.process_index, trainer.model)
