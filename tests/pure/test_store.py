"""The store of measured figures: many processes, full disks, damaged files, export and import."""

import json
import multiprocessing as mp
import resource
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from planloom.cost import PriceStore
from planloom.cost.keys import flags_of, mask_figures
from planloom.errors import PriceError


def store(path: Path, device: str = "cpu", software: str = "1") -> PriceStore:
    return PriceStore(path, device=device, software=software)


def save_many(path: Path, name: str) -> None:
    """Opens the store itself: the first process makes the tables."""
    for i in range(25):
        store(path).save({f"{name}/{i}": (float(i), 0.0), "shared": (1.0, 0.0)})


def test_processes_that_write_at_once_lose_nothing(tmp_path: Path) -> None:
    path, context = tmp_path / "prices.sqlite", mp.get_context("spawn")
    writers = [context.Process(target=save_many, args=(path, name)) for name in "abcd"]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(timeout=60)
        assert writer.exitcode == 0
    assert len(store(path).load()) == 4 * 25 + 1


def test_what_was_saved_before_a_kill_is_there(tmp_path: Path) -> None:
    path = tmp_path / "prices.sqlite"
    program = (
        "import sys; from planloom.cost import PriceStore\n"
        "store = PriceStore(sys.argv[1], device='cpu', software='1')\n"
        "for i in range(10**6):\n    store.save({str(i): (1.0, 0.0)}); print(i, flush=True)\n"
    )
    writer = subprocess.Popen([sys.executable, "-c", program, str(path)], stdout=subprocess.PIPE, text=True)
    assert writer.stdout is not None
    told = [writer.stdout.readline() for _ in range(20)]
    writer.send_signal(signal.SIGKILL)
    writer.wait()
    writer.stdout.close()
    known = store(path).load()
    assert all(line.strip() in known for line in told)
    store(path).save({"after": (1.0, 0.0)})


def fill_until_full(path: Path) -> None:
    """No file may grow beyond 64 KiB here: to SQLite that is a full disk."""
    mine = store(path)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))
    saved: list[int] = []

    def fill() -> None:
        for i in range(10_000):
            mine.save({f"a long key to fill the disk sooner {i} {'x' * 200}": (1.0, 0.0)})
            saved.append(i)

    with pytest.raises(PriceError, match="cannot be written") as caught:
        fill()
    assert "what was saved stays" in str(caught.value)
    assert len(mine.load()) == len(saved) > 10


def test_a_full_disk_is_an_error_and_loses_nothing(tmp_path: Path) -> None:
    writer = mp.get_context("spawn").Process(target=fill_until_full, args=(tmp_path / "prices.sqlite",))
    writer.start()
    writer.join(timeout=60)
    assert writer.exitcode == 0
    store(tmp_path / "prices.sqlite").save({"now there is room": (1.0, 0.0)})


def test_a_damaged_store_is_refused_and_not_changed(tmp_path: Path) -> None:
    path = tmp_path / "prices.sqlite"
    store(path).save({str(i): (1.0, 0.0) for i in range(2000)})
    content = bytearray(path.read_bytes())
    content[4096:12288] = b"\xff" * 8192
    path.write_bytes(content)
    with pytest.raises(PriceError, match="cannot be read") as caught:
        store(path).load()
    assert "move the file away" in str(caught.value)
    assert path.read_bytes() == content


def test_a_store_of_a_newer_planloom_is_refused(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "prices.sqlite") as connection:
        connection.execute("PRAGMA user_version = 99")
    connection.close()
    with pytest.raises(PriceError, match="newer Planloom"):
        store(tmp_path / "prices.sqlite")


def test_an_older_store_is_taken_over_without_its_figures(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "prices.sqlite") as connection:
        connection.execute("CREATE TABLE measured (key TEXT)")
    connection.close()
    store(tmp_path / "prices.sqlite").save({"a": (1.0, 0.5)})
    assert store(tmp_path / "prices.sqlite").load_with_spread() == {"a": (1.0, 0.5)}


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(PriceError, match="cannot be opened"):
        store(tmp_path / "file" / "prices.sqlite")


def test_what_could_not_be_measured_is_kept_until_it_is(tmp_path: Path) -> None:
    mine = store(tmp_path / "prices.sqlite")
    mine.skip({"a": "out of memory", "b": "out of memory"})
    assert mine.skipped() == {"a": "out of memory", "b": "out of memory"}
    mine.save({"a": (1.0, 0.0)})
    assert mine.skipped() == {"b": "out of memory"}
    mine.forget_skipped()
    assert mine.skipped() == {}


def test_a_figure_that_is_no_number_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PriceError, match="no number"):
        store(tmp_path / "prices.sqlite").save({"a": (float("nan"), 0.0)})


def test_a_profile_travels_in_a_file(tmp_path: Path) -> None:
    gpu = store(tmp_path / "gpu.sqlite", device="NVIDIA H200", software="torch 2.11, compiled")
    figures = {f"run/{i}/forward": (i / 7, 1e-9 * i) for i in range(50)}
    gpu.save(figures)
    gpu.skip({"run/x/forward": "out of memory"})
    store(tmp_path / "gpu.sqlite", device="other").save({"a": (1.0, 0.0)})
    assert gpu.export(tmp_path / "h200.json") == 50
    laptop = tmp_path / "laptop.sqlite"
    store(laptop).save({"mine": (1.0, 0.0)})
    (name,) = store(laptop).import_(tmp_path / "h200.json")
    assert (name.device, name.software, name.num_figures) == ("NVIDIA H200", "torch 2.11, compiled", 50)
    assert [(n.device, n.num_figures) for n in store(laptop).devices()] == [("NVIDIA H200", 50), ("cpu", 1)]
    chosen = PriceStore.choose(laptop, "h200 compiled")
    assert chosen.load_with_spread() == figures
    assert chosen.skipped() == {"run/x/forward": "out of memory"}
    assert store(laptop).load() == {"mine": 1.0}
    assert not list(tmp_path.glob(".*partial"))


def test_choosing_a_device_names_what_there_is(tmp_path: Path) -> None:
    path = tmp_path / "prices.sqlite"
    with pytest.raises(PriceError, match="no store"):
        PriceStore.choose(path, "h200")
    for device in ("NVIDIA H100", "NVIDIA H200", "NVIDIA H200 NVL"):
        store(path, device=device).save({"a": (1.0, 0.0)})
    with pytest.raises(PriceError, match="no measured profiles match 'a100'") as caught:
        PriceStore.choose(path, "a100")
    assert "NVIDIA H100 (1, 1 figures)" in caught.value.given
    with pytest.raises(PriceError, match="3 measured profiles match 'nvidia'"):
        PriceStore.choose(path, "nvidia")
    assert PriceStore.choose(path, "NVIDIA H200").device == "NVIDIA H200"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text[: len(text) // 2], "is damaged"),
        (lambda text: text.replace("0.25", "0.26"), "is damaged"),
        (lambda text: text.replace('"version": 2', '"version": 1'), "is of another version"),
        (lambda text: "[]", "is damaged"),
        (lambda text: "", "is damaged"),
        (lambda text: json.dumps({"format": "other", "version": 2}), "is of another version"),
    ],
)
def test_another_or_a_damaged_file_is_refused_whole(tmp_path: Path, change, message: str) -> None:
    mine, path = store(tmp_path / "prices.sqlite"), tmp_path / "p.json"
    mine.save({"a": (0.25, 0.0), "b": (1.0, 0.0)})
    mine.export(path)
    path.write_text(change(path.read_text()))
    other = store(tmp_path / "other.sqlite")
    with pytest.raises(PriceError, match=message):
        other.import_(path)
    assert other.devices() == ()


def test_a_file_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    mine = store(tmp_path / "prices.sqlite")
    mine.save({"a": (0.25, 0.0)})
    with pytest.raises(PriceError, match="cannot be written"):
        mine.export(tmp_path / "none" / "p.json")
    with pytest.raises(PriceError, match="cannot be read"):
        mine.import_(tmp_path / "none" / "p.json")


@pytest.mark.parametrize("count", [0, 1, 47, 48, 49, 130])
def test_masks_of_any_length_survive_as_floats(count: int) -> None:
    flags = tuple(i % 3 == 0 for i in range(count))
    assert flags_of("key", mask_figures("key", flags), count) == flags
