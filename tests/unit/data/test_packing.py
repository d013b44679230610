import time

import numpy as np
import pytest
import torch

from swiftfp8.config.schema import Config
from swiftfp8.data.collator import Collator
from swiftfp8.data.dataset import load_datasets
from swiftfp8.data.lengths import MASKED
from swiftfp8.data.packing import PackCollator, first_fit_decreasing, pack_rows
from swiftfp8.data.token_rows import TokenRows


def make_rows(lengths, seed=0):
    rng = np.random.default_rng(seed)
    pairs = []
    for length in lengths:
        ids = rng.integers(3, 250, length).astype(np.int32)
        labels = ids.copy()
        labels[: length // 3] = MASKED
        pairs.append((ids, labels))
    return TokenRows.of(pairs)


def random_lengths(count, capacity, seed=1):
    return np.random.default_rng(seed).geometric(4 / capacity, count).clip(2, capacity)


def pieces(pack):
    """The rows of a pack, cut where positions restart."""
    starts = np.flatnonzero(pack["position_ids"] == 0)
    return [
        (ids.tolist(), labels.tolist())
        for ids, labels in zip(
            np.split(pack["input_ids"], starts)[1:],
            np.split(pack["labels"], starts)[1:],
            strict=True,
        )
    ]


@pytest.mark.parametrize("shuffle", [True, False])
def test_every_row_is_in_one_pack_whole(shuffle):
    rows = make_rows(random_lengths(300, 64))
    packed = pack_rows(rows, 64, seed=5, shuffle=shuffle, window=100)
    assert max(packed.lengths) <= 64 and packed.lengths.sum() == rows.lengths.sum()
    found = sorted(piece for k in range(len(packed)) for piece in pieces(packed[k]))
    expected = []
    for row in (rows[k] for k in range(len(rows))):
        expected.append((row["input_ids"], [MASKED, *row["labels"][1:]]))
    assert found == sorted(expected)
    assert packed[-1]["input_ids"].tolist() == packed[len(packed) - 1]["input_ids"].tolist()
    with pytest.raises(IndexError):
        packed[len(packed)]


def test_packs_depend_on_the_seed_and_on_nothing_else():
    rows = make_rows(random_lengths(200, 64))

    def layout(seed):
        packed = pack_rows(rows, 64, seed=seed, window=50)
        return [packed[k]["input_ids"].tolist() for k in range(len(packed))]

    assert layout(1) == layout(1)
    assert layout(1) != layout(2)


def test_without_shuffling_packs_keep_the_rows_order():
    rows = make_rows([30, 30, 30, 30, 30, 30])
    packed = pack_rows(rows, 64, seed=0, shuffle=False)
    ids = [token for k in range(3) for token in packed[k]["input_ids"].tolist()]
    assert ids == [token for k in range(6) for token in rows[k]["input_ids"]]


def test_first_fit_decreasing_is_what_the_name_says():
    lengths = random_lengths(400, 100)
    packs: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda k: -lengths[k]):
        fits = (p for p in packs if sum(lengths[k] for k in p) + lengths[index] <= 100)
        pack = next(fits, None)
        if pack is None:
            packs.append(pack := [])
        pack.append(index)
    assert first_fit_decreasing(lengths, 100) == sorted(sorted(pack) for pack in packs)
    assert lengths.sum() / (100 * len(packs)) > 0.97
    assert first_fit_decreasing([7], 7) == [[0]]


def test_100_000_rows_are_packed_in_seconds():
    rows = make_rows(np.full(100_000, 3))
    begun = time.perf_counter()
    packed = pack_rows(rows, 2048, seed=0)
    assert time.perf_counter() - begun < 15  # about 1 s
    assert len(packed) == pytest.approx(100_000 * 3 / 2046, rel=0.01)


@pytest.mark.parametrize("multiple", [1, 8, 128])
@pytest.mark.parametrize("flatten", [False, True])
def test_collated_packs_are_filled_by_their_own_first_tokens(multiple, flatten):
    packed = pack_rows(make_rows([20, 9, 30, 11, 5]), 37, seed=0)
    packs = [packed[k] for k in range(len(packed))]
    batch = PackCollator(token_multiple=multiple, flatten=flatten)(packs)
    assert batch.pop("num_tokens") == 75
    assert set(batch) == {"input_ids", "labels", "position_ids"}  # and no attention mask
    assert batch["input_ids"].shape[0] == (1 if flatten else len(packs))
    assert batch["input_ids"].shape[1] % multiple == 0
    if flatten:
        packs = [{key: np.concatenate([pack[key] for pack in packs]) for key in packs[0]}]
    for k, pack in enumerate(packs):
        size = len(pack["input_ids"])
        ids, positions, labels = (batch[n][k] for n in ("input_ids", "position_ids", "labels"))
        assert torch.equal(ids[:size], torch.tensor(pack["input_ids"]))
        assert torch.equal(labels[:size], torch.tensor(pack["labels"]))
        assert (labels[size:] == MASKED).all()
        more = min(len(ids) - size, size)
        assert torch.equal(ids[size : size + more], ids[:more])
        assert torch.equal(positions[size : size + more], positions[:more])


def test_datasets_come_packed_with_a_report(tokenizer):
    common = {"dataset": "quickstart#60", "val_dataset": "quickstart-reworded#20"}
    config = Config(**common, max_length=256, packing=True)
    packed = load_datasets(config, tokenizer, 16)
    plain = load_datasets(Config(**common, max_length=256), tokenizer, 16)
    assert isinstance(plain.collator, Collator) and isinstance(packed.collator, PackCollator)
    for part in ("train", "eval"):
        assert getattr(packed, part).lengths.sum() == getattr(plain, part).lengths.sum()
        assert max(getattr(packed, part).lengths) <= 256
    report = packed.report.train
    assert (report.rows, report.packs, report.pack_capacity) == (60, len(packed.train), 256)
    assert report.tokens == plain.report.train.tokens
    assert f"packed into {len(packed.train)} sequences of up to 256 tokens" in "\n".join(
        packed.report.summary_lines()
    )
    flash = Config(**common, packing=True, attn_implementation="flash_attention_2")
    assert load_datasets(flash, tokenizer, 16).collator.flatten


def test_a_data_loader_takes_arrays_that_hold_what_the_lists_do():
    rows = make_rows([5, 9, 3])
    arrays = rows.__getitems__([2, 0])
    assert all(isinstance(value, np.ndarray) for row in arrays for value in row.values())
    assert [{k: v.tolist() for k, v in row.items()} for row in arrays] == [rows[2], rows[0]]
    loader = torch.utils.data.DataLoader(rows, batch_size=3, collate_fn=Collator(pad_id=0))
    (batch,) = loader
    expected = Collator(pad_id=0)([rows[k] for k in range(3)])
    assert all(torch.equal(batch[k], expected[k]) for k in ("input_ids", "labels"))
    assert batch["input_ids"].dtype == torch.long and batch["num_tokens"] == 17
