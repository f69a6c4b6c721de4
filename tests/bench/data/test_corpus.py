import gzip
import hashlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import huggingface_hub
import numpy as np
import pytest

pytest.importorskip("datasets")

from bench import data
from bench.core.errors import UserError
from bench.data.pipeline import corpus
from bench.data.pipeline.corpus import CorpusSelection
from bench.sweep import plan

pytestmark = pytest.mark.usefixtures("cache")

DOCUMENTS = ["Attention is all you need.", "Über ZeRO: 1 ≤ 2.", "", "Third."]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Folder with the same documents as JSON Lines, compressed JSON Lines, Parquet, and plain text. The plain text
    exists twice: in a single file, and in one file per document."""
    import pyarrow
    from pyarrow import parquet

    lines = "".join(json.dumps({"id": n, "body": text}) + "\n" for n, text in enumerate(DOCUMENTS))
    (tmp_path / "corpus.jsonl").write_text(lines)
    (tmp_path / "corpus.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    parquet.write_table(pyarrow.table({"body": [*DOCUMENTS, None]}), tmp_path / "corpus.parquet")
    (tmp_path / "corpus.txt").write_text("\n".join(DOCUMENTS), encoding="utf-8")
    for n, text in enumerate(DOCUMENTS):
        (tmp_path / f"document_{n}.txt").write_text(text, encoding="utf-8")
    return tmp_path


def byt5(text: str) -> list[int]:
    return [byte + 3 for byte in text.encode()] + [1]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("corpus.jsonl", {"field": "body"}),
        ("corpus.jsonl.gz", {"field": "body"}),
        ("corpus.parquet", {"field": "body"}),
        ("corpus.txt", {"sample_by": "line"}),
        ("document_*.txt", {}),
    ],
)
def test_every_file_format_gives_the_same_corpus(folder: Path, name: str, options: dict[str, str]) -> None:
    text = corpus.load(CorpusSelection(files=(str(folder / name),), **options))
    assert text.tokens.tolist() == [token for document in DOCUMENTS if document for token in byt5(document)]
    assert text.ends.tolist() == np.cumsum([len(byt5(text)) for text in DOCUMENTS if text]).tolist()
    joined = "".join(DOCUMENTS).encode()
    assert (text.documents, text.bytes) == (3, len(joined))
    assert text.sha256 == hashlib.sha256(joined).hexdigest()


def test_local_data_set_folder_is_read_with_the_hub_option(folder: Path) -> None:
    # datasets loads a local folder in the same way as a data set on the hub: load_dataset(name, streaming=True).
    home = folder / "home"
    home.mkdir()
    (folder / "corpus.jsonl").rename(home / "train.jsonl")
    text = corpus.load(CorpusSelection(hub=str(home), field="body"))
    assert (text.name, text.documents) == (f"{home}/train", 3)


def test_corpus_ends_at_max_documents_or_max_bytes(folder: Path) -> None:
    selection = CorpusSelection(files=(str(folder / "corpus.jsonl"),), field="body")
    assert corpus.load(selection.model_copy(update={"max_documents": 2})).documents == 2
    cut = corpus.load(selection.model_copy(update={"max_bytes": 27}))  # ends between the two bytes of "Ü"
    assert (cut.documents, cut.bytes) == (1, 26)


def test_changed_file_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("one")
    selection = CorpusSelection(files=(str(path),))
    before = corpus.load(selection)
    path.write_text("another")
    assert corpus.load(selection).sha256 != before.sha256


def test_default_corpus_is_the_python_standard_library() -> None:
    paths = corpus.list_files(CorpusSelection())
    assert paths[0].name == "__future__.py"
    assert not {"site-packages", "test"} & {part for path in paths for part in path.parts[-4:]}
    text = corpus.load(CorpusSelection(max_bytes=50_000))
    assert text.bytes == 50_000
    assert text.name.startswith("Python 3.")


@pytest.mark.processes
def test_only_one_of_two_concurrent_ranks_tokenises_the_corpus(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text " * 1000)
    code = (
        "import sys; from bench.data.pipeline import corpus\n"
        "print(corpus.load(corpus.CorpusSelection(files=(sys.argv[1],))).sha256)"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "a.txt")]
    environment = os.environ | {"HF_DATASETS_CACHE": str(tmp_path / "cache"), "HF_DATASETS_DISABLE_PROGRESS_BARS": "0"}
    ranks = [
        subprocess.Popen(command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for _ in range(2)
    ]
    outputs = [rank.communicate(timeout=250) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], outputs
    assert len({out for out, _ in outputs}) == 1
    assert sum("Generating" in err for _, err in outputs) == 1  # the progress bar of the only process that tokenised
    assert len(list((tmp_path / "cache").rglob("*.arrow"))) == 1


def test_unreadable_corpus_is_refused_in_one_line(folder: Path) -> None:
    def message(**selection: object) -> str:
        with pytest.raises(UserError) as error:
            corpus.load(CorpusSelection(**selection))
        assert "\n" not in str(error.value)
        return str(error.value)

    jsonl = (str(folder / "corpus.jsonl"),)
    assert (
        message(files=jsonl, field="bdy")
        == f"data.field=bdy: no such column in line 1 of {folder}/corpus.jsonl; did you mean body?"
    )
    wrong = f"data.field=id: holds int, not text in line 1 of {folder}/corpus.jsonl; choose a field with text: body"
    assert message(files=jsonl, field="id") == wrong
    assert "holds no text" in message(files=(str(folder / "document_2.txt"),))
    assert message(files=("nowhere/*.txt",)).startswith("data.files=nowhere/*.txt: no such file")
    assert message(files=(str(folder),)).startswith(f"data.files={folder}: is a folder; name its files, such as ")
    assert "unknown format" in message(files=(sys.executable,))
    assert "mixes json and text" in message(files=(*jsonl, str(folder / "corpus.txt")))
    assert message(hub=str(folder / "nowhere")).startswith(f"data.hub={folder}/nowhere: ")
    assert message(files=jsonl, field="body", tokenizer=str(folder)).startswith(f"data.tokenizer={folder}: ")


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("latin1.jsonl", {"field": "body"}),
        ("latin1.jsonl.gz", {"field": "body"}),
        ("latin1.txt", {}),
        ("latin1.txt", {"sample_by": "line"}),
        ("latin1.txt", {"sample_by": "paragraph"}),
    ],
)
def test_file_that_is_not_utf8_is_refused_with_its_line(tmp_path: Path, name: str, options: dict[str, str]) -> None:
    lines = ['{"body": "plain"}', "", '{"body": "é"}', '{"body": "è"}']
    content = "\r\n".join(lines).encode("latin-1")
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    with pytest.raises(UserError, match=rf"^data\.files=.*/{name}: line 3 is not UTF-8; convert the file, "):
        corpus.load(CorpusSelection(files=(str(tmp_path / name),), **options))


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le"])
@pytest.mark.parametrize("name", ["wide.jsonl", "wide.jsonl.gz", "wide.txt"])
def test_utf16_file_is_refused_with_its_encoding(tmp_path: Path, name: str, encoding: str) -> None:
    content = '{"text": "plain"}\n'.encode(encoding)
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    with pytest.raises(UserError, match=rf"{name}: begins like UTF-16, .* iconv --from-code=UTF-16 --to-code=UTF-8"):
        corpus.load(CorpusSelection(files=(str(tmp_path / name),)))


def test_folder_without_a_tokenizer_is_refused_before_the_run(tmp_path: Path) -> None:
    """A checkpoint may have been saved without its tokenizer. If the folder has damaged files of a tokenizer, the run
    itself refuses the folder, and prints the complete error message of transformers."""
    transformers = pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(UserError, match=r": the folder has no files of a tokenizer; save one with "):
        plan.plan_point(f"data=text data.tokenizer={tmp_path} machine=cpu", "adhoc", None)
    (tmp_path / "config.json").write_text('{"model_type": "gpt2", "tokenizer_class": "ByT5Tokenizer"}')
    assert corpus.load_tokenizer(str(tmp_path)).eos == transformers.ByT5Tokenizer().eos_token_id
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    (tmp_path / "vocab.json").write_text("{}")
    with pytest.raises(UserError, match=r"[^:]; give a folder with a saved tokenizer, or byt5$"):
        corpus.load_tokenizer(str(tmp_path))


def test_byt5_tokenizer_equals_that_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    theirs, ours = transformers.ByT5Tokenizer(), corpus.load_tokenizer("byt5")
    text = "def f(x):\n\treturn 'é€😀'  # ZeRO ≤ 3\r\n"
    assert ours.encode([text])[0].tolist() == theirs(text, add_special_tokens=False)["input_ids"]
    assert (ours.vocabulary, ours.eos) == (len(theirs), theirs.eos_token_id)
    names = [f"<extra_id_{n}>" for n in range(len(ours.sentinels))]
    assert ours.sentinels.tolist() == theirs.convert_tokens_to_ids(names)


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """Dict from request paths to HTTP errors. A server on this machine, which replaces the Hugging Face Hub, responds
    to these paths with these errors, and to all other paths with an empty JSON object."""
    errors: dict[str, str] = {}

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            error = errors.get(self.path)
            self.send_response(404 if error else 200)
            self.send_header("X-Error-Code", error or "")
            self.send_header("Content-Length", "10")
            self.end_headers()
            self.wfile.write(b'{"id":"a"}')

        def log_message(self, *args: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Answer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
        yield errors
        server.shutdown()


def test_unknown_tokenizer_is_refused_after_one_request(
    answers: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answers["/api/models/nobody/gone"] = "RepoNotFound"
    data.check_tokenizer("nobody/there")
    with pytest.raises(
        UserError, match=r"data.tokenizer=nobody/gone: neither a folder nor a model on the Hugging Face H"
    ):
        data.check_tokenizer("nobody/gone")
    with pytest.raises(
        UserError, match=r"data.tokenizer=a/b/c: neither a folder nor a name on the Hugging Face Hub; give"
    ):
        data.check_tokenizer("a/b/c")
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")  # nothing listens on this port
    begin = time.monotonic()
    with pytest.raises(
        UserError, match=r"nobody/there: neither .* cache, and the Hugging Face Hub does not answer"
    ) as run:
        corpus.load_tokenizer("nobody/there")
    with pytest.raises(UserError) as planned:
        plan.plan_point("data=text data.tokenizer=nobody/there machine=cpu", "adhoc", None)
    assert str(planned.value) == str(run.value) and time.monotonic() - begin < 15
    assert capsys.readouterr().err == "zeroscale: looking for the tokenizer nobody/there on the Hugging Face Hub\n"
    folder = tmp_path / "models--nobody--there" / "snapshots" / "0"
    folder.mkdir(parents=True)
    (folder / "tokenizer.json").touch()
    (folder.parents[1] / "refs").mkdir()
    (folder.parents[1] / "refs" / "main").write_text("0")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    data.check_tokenizer("nobody/there")
