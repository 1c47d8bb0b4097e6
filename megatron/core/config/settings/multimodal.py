"""Which images a run reads, and how they are cut and written into a sequence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from megatron.core.config.flags.declare import flag
from megatron.core.config.flags.when import When

IMAGES = When("reads_images")


@dataclass(frozen=True, slots=True)
class MultimodalDataConfig:
    """Conversations about images. With an encoder of images, --data-path names LLaVA's JSON files: a list of
    {"image": PATH, "conversations": [{"from": "human", "value": "<image>\\nWhat is it?"}, {"from": "gpt", "value":
    "A cat."}]}; folders of Energon and YAML files that blend them; or pairs that tools/preprocess_mmdata.py wrote.
    """

    USED_WITH: ClassVar[When] = IMAGES

    image_folder: str | None = flag(
        None, "folder that the paths of images begin at; left out: that of the JSON file", role="data"
    )
    image_aspect_ratio: Literal["square", "pad", "crop"] = flag(
        "square",
        "how an image becomes a square; square: stretched (Megatron); pad: with a border of the mean colour (LLaVA 1.5); crop: its "
        "middle (CLIP)",
        role="training",
    )
    use_tiling: bool = flag(False, "cut an image into up to --max-num-tiles tiles, as its shape asks for", role="data")
    max_num_tiles: int = flag(
        1, "most tiles of an image, without the thumbnail", role="data", used_with=(IMAGES, When("use_tiling"))
    )
    use_thumbnail: bool = flag(
        False,
        "--use-tiling: the whole image follows as one more tile, if it was cut",
        role="data",
        used_with=(IMAGES, When("use_tiling")),
    )
    use_tile_tags: bool = flag(
        False,
        "--use-tiling: the text <tile_1>, <tile_2> ... stands before each tile",
        role="data",
        used_with=(IMAGES, When("use_tiling")),
    )
    image_tag_type: Literal["nvlm", "internvl", "smolvlm"] | None = flag(
        None,
        "text around an image: <Image> and </Image>, <img> and </img>, or SmolVLM's tags, with --use-tiling those of rows and columns; "
        "left out: none",
        role="data",
    )
    max_image_pixels: int = flag(
        50_000_000, "images with more pixels are left out, before they are unpacked", role="training"
    )
    max_image_bytes: int = flag(50_000_000, "files of images with more bytes are left out", role="training")
    online_evaluation_config: str | None = flag(
        None,
        "YAML file of a benchmark whose questions are answered and scored at every evaluation: its task, gt_path, input_image_path, "
        "num_samples_per_partition, out_seq_length",
        role="free",
    )

    @property
    def cuts_as_smolvlm(self) -> bool:
        """Whether an image is cut by the grid of SmolVLM, with a tag for the row and column of each tile."""
        return self.use_tiling and self.image_tag_type == "smolvlm"
