"""Images in folders, one a class: FOLDER/cat/1.png, FOLDER/dog/7.jpg. A sample is an image and the number of its class.

Classes are numbered in the order of their names. Files whose header cannot be read are left out, counted and named.
"""

from __future__ import annotations

import logging
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from megatron.core.config.flags.declare import ConfigError
from megatron.core.config.settings.run import RunConfig
from megatron.core.datasets.conversations import list_first_problems
from megatron.core.datasets.dataset_protocols import Sample, SplitRequest, TokenSpan
from megatron.core.datasets.images import (
    ImageError,
    ImageOptions,
    decode_image,
    read_image_bytes,
    tile_image,
    upright_image_size,
)
from megatron.core.datasets.indexed import DataError
from megatron.core.datasets.multimodal import DamagedImages
from megatron.core.datasets.packing import shuffle_epochs
from megatron.core.tokenizers.base import Tokenizer

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LabelledImageFiles:
    """The usable images of a folder: (path, number of its class), and the names of the classes."""

    prefix: str
    files: tuple[tuple[str, int], ...]
    classes: tuple[str, ...]


class ImageFolderDataset:
    """Some images of a folder, in an order of its own each epoch. A sample holds images (float32 [1, channels, height, width])
    and one label; tokens, image_slots and image_rows are there for what takes every kind of sample.
    """

    def __init__(self, source: LabelledImageFiles, request: SplitRequest, options: ImageOptions, *, seed: int) -> None:
        self.source, self.options, self.prefix, part = source, options, source.prefix, request.part
        # Files of a class stand together, so a split takes its share of a shuffled list.
        shuffled = np.random.default_rng((seed, len(source.files))).permutation(len(source.files))
        self._own = shuffled[part.start : part.stop]
        self.description = {
            "class": type(self).__name__,
            "prefix": source.prefix,
            "part": [part.start, part.stop, len(source.files)],
            "seed": seed,
            "split": request.name,
        }
        self._order = self._own[shuffle_epochs(len(self._own), request.num_samples, seed)]
        self.tokens_per_epoch, self.samples_per_epoch = len(self._own), float(len(self._own))
        self.damaged = DamagedImages()

    def __len__(self) -> int:
        """The number of samples."""
        return len(self._order)

    def __getitem__(self, index: int) -> Sample:
        """The index-th sample; one whose image is damaged has no loss."""
        path, label = self.source.files[self._order[index]]
        learnt = 1.0
        try:
            image = tile_image(decode_image(read_image_bytes(path, self.options), self.options), self.options)
            self.damaged.note_usable()
        except ImageError as error:
            self.damaged.add(path, str(error))
            image = np.zeros((1, self.options.channels, self.options.height, self.options.width), np.float32)
            learnt = 0.0
        return {
            "tokens": np.zeros(1, np.int64),
            "labels": np.array([label], np.int64),
            "loss_mask": np.array([learnt], np.float32),
            "image_slots": np.full(1, -1, np.int64),
            "images": image,
            "image_rows": np.array(0, np.int64),
        }

    def token_sources(self, index: int) -> list[TokenSpan]:
        """The file of a sample, as a document of one token."""
        number = int(self._order[index])
        return [TokenSpan(self.prefix, number, number, 0, 1, 0)]

    def samples_with_document(self, document: int) -> np.ndarray:
        """The samples with this file, in rising order. int64 [samples]"""
        return np.flatnonzero(self._order == document)


@dataclass(frozen=True, slots=True)
class ImageFolderDatasetKind:
    """Images in folders; --split counts files."""

    run: RunConfig
    options: ImageOptions
    name: str = ImageFolderDataset.__name__

    def open(self, prefix: str) -> LabelledImageFiles:
        """The images of a folder whose headers can be read."""
        try:
            classes = tuple(sorted(entry.name for entry in os.scandir(prefix) if entry.is_dir()))
        except OSError as error:
            raise DataError(
                f"{prefix} cannot be read: {error.strerror}; give a folder with a folder for each class"
            ) from None
        if len(classes) != self.run.model.vision.num_classes:
            raise ConfigError(
                f"{prefix} holds {len(classes)} folders, one a class, and --num-classes is {self.run.model.vision.num_classes}"
            )
        files = [
            (os.path.join(prefix, name, file), number)
            for number, name in enumerate(classes)
            for file in sorted(os.listdir(os.path.join(prefix, name)))
        ]
        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            problems = list(pool.map(lambda file: self._image_problem(file[0]), files))
        bad = [f"{path}: {problem}" for (path, _), problem in zip(files, problems, strict=True) if problem]
        if bad:
            logger.warning(
                "%s: %d of %d files are left out\n%s", prefix, len(bad), len(files), list_first_problems(bad)
            )
        usable = tuple(file for file, problem in zip(files, problems, strict=True) if not problem)
        return LabelledImageFiles(prefix, usable, classes)

    def _image_problem(self, path: str) -> str:
        """Return why the image file cannot be used, or "" if its header can be read."""
        try:
            upright_image_size(read_image_bytes(path, self.options), self.options)
        except ImageError as error:
            return str(error)
        return ""

    def num_split_units(self, source: LabelledImageFiles) -> int:
        """The number of images."""
        return len(source.files)

    def split_has_any_sample(self, source: LabelledImageFiles, part: range) -> bool:
        """Whether there is an image."""
        return len(part) > 0

    def build_one_split(self, source: LabelledImageFiles, request: SplitRequest) -> ImageFolderDataset:
        """Samples of these images."""
        return ImageFolderDataset(source, request, self.options, seed=self.run.train.seed)


def make_image_folder_dataset_kind(run: RunConfig, tokenizer: Tokenizer) -> ImageFolderDatasetKind:
    """Return the dataset kind of an image classifier. tokenizer: unused. `ConfigError` for --mock-data."""
    if run.data.mock_data:
        raise ConfigError(
            "--mock-data: an image classifier reads a folder that holds a folder of images for each class; give --data-path FOLDER"
        )
    return ImageFolderDatasetKind(run, ImageOptions.from_config(run.model, run.data.multimodal))
