"""The file of tokens: what is read, what is refused and how that is said, and changes to it."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from service.access import Access
from service.errors import ServiceError
from service.scopes import HTTP, RPC, SCOPES, rpc_scope
from service.token_file import create, revoke
from service.tokens import MAX_TOKENS, digest, find, read_tokens
from trainer.errors import LivebedError, SettingsError

HASH = digest(b"x").hex()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "tokens.jsonl"


def written(path: Path, text: str, mode: int = 0o600) -> Path:
    path.write_text(text)
    path.chmod(mode)
    return path


def test_a_token_is_256_random_bits_and_only_its_hash_is_stored(path: Path) -> None:
    token = create(path, "ads", ["score", "lookup"])
    assert token.startswith("lbd_") and len(token) == 4 + 43
    assert token != create(path, "ads-2", ["score"])
    assert token not in path.read_text()
    assert path.stat().st_mode & 0o777 == 0o600
    found = find(read_tokens(path), token.encode())
    assert found is not None
    assert (found.name, found.scopes) == ("ads", {"score", "lookup"})
    assert find(read_tokens(path), token.encode()[:-1]) is None


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660])
def test_a_file_that_others_may_read_is_refused_and_the_remedy_named(path: Path, mode: int) -> None:
    create(path, "ads", ["score"])
    path.chmod(mode)
    with pytest.raises(SettingsError, match=rf"mode {mode:04o}.*chmod 600"):
        read_tokens(path)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("nonsense", "line 1: got 'no token'"),
        (f'{{"name": "a", "sha256": "{HASH}", "scopes": []}}', "length >= 1"),
        (f'{{"name": "a", "sha256": "{HASH}", "scopes": ["score"], "scope": 1}}', "unknown field `scope`"),
        (
            f'{{"name": "a", "sha256": "{HASH}", "scopes": ["root"]}}',
            "line 1: scopes: got 'root', wanted some of admin",
        ),
        ('{"name": "a", "sha256": "lbd_a-token-by-mistake", "scopes": ["score"]}', "sha256"),
        (f'{{"name": "a", "sha256": "{HASH}", "scopes": ["score"], "expires": "2030-01-01T00:00:00"}}', "timezone"),
        (f'{{"name": "a", "sha256": "{HASH}", "scopes": ["score"]}}\n' * 2, "line 2: name: got 'a'"),
    ],
)
def test_a_line_that_is_no_token_is_refused_by_its_number_and_never_shown(path: Path, text: str, said: str) -> None:
    with pytest.raises(SettingsError) as caught:
        read_tokens(written(path, text))
    assert said in str(caught.value)
    assert "by-mistake" not in str(caught.value)


def test_a_file_of_too_many_tokens_is_refused(path: Path) -> None:
    lines = [f'{{"name": "t{k}", "sha256": "{HASH}", "scopes": ["score"]}}' for k in range(MAX_TOKENS + 1)]
    with pytest.raises(SettingsError, match=f"{MAX_TOKENS + 1} tokens"):
        read_tokens(written(path, "\n".join(lines)))


def test_comments_and_empty_lines_are_passed_over(path: Path) -> None:
    assert read_tokens(written(path, "# nobody yet\n\n")) == ()


def test_a_missing_file_names_the_command_that_makes_one(path: Path) -> None:
    with pytest.raises(SettingsError, match=r"No such file.*livebed token create"):
        read_tokens(path)


def test_a_name_is_given_once_and_a_revoked_one_is_free_again(path: Path) -> None:
    first = create(path, "ads", ["score"])
    with pytest.raises(LivebedError, match="already"):
        create(path, "ads", ["score"])
    revoke(path, "ads")
    assert find(read_tokens(path), first.encode()) is None
    create(path, "ads", ["score"])
    with pytest.raises(LivebedError, match="no token 'other'"):
        revoke(path, "other")


@pytest.mark.parametrize(("name", "scope"), [("a b", "score"), ("", "score"), ("ads", "root")])
def test_a_bad_name_or_scope_makes_no_token(path: Path, name: str, scope: str) -> None:
    with pytest.raises(SettingsError):
        create(path, name, [scope])
    assert not path.exists()


def test_several_that_edit_the_file_at_once_lose_nothing(path: Path) -> None:
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda k: create(path, f"t{k}", ["score"]), range(40)))
    assert len(read_tokens(path)) == 40


def denied(call: Callable[[], object]) -> str:
    with pytest.raises(ServiceError) as caught:
        call()
    assert caught.value.code == "unauthenticated"
    return caught.value.detail


def test_what_is_no_bearer_token_is_unauthenticated(path: Path) -> None:
    token = create(path, "ads", ["score"]).encode()
    access = Access(path)
    assert access.token(b"Bearer " + token).name == access.token(b"bearer  " + token).name == "ads"
    for header in (None, b"", b"Bearer", b"Bearer ", b"Basic " + token, token, b"Bearer " + token + b"x"):
        assert token not in denied(lambda header=header: access.token(header)).encode()


def test_a_token_is_refused_from_the_moment_it_expires(path: Path) -> None:
    late = create(path, "late", ["score"], expires_days=0).encode()
    soon = create(path, "soon", ["score"], expires_days=1).encode()
    access = Access(path)
    assert access.token(b"Bearer " + soon).name == "soon"
    assert "expired" in denied(lambda: access.token(b"Bearer " + late))


def test_a_broken_new_file_keeps_the_old_tokens_and_is_said_once(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    token = b"Bearer " + create(path, "ads", ["score"]).encode()
    access = Access(path)
    written(path, "nonsense")
    for _ in range(3):
        access.watched.refresh()
    assert access.token(token).name == "ads"
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    path.unlink()
    access.watched.refresh()
    assert access.token(token).name == "ads"
    written(path, "")
    access.watched.refresh()
    denied(lambda: access.token(token))


def test_a_file_that_is_as_it_was_is_not_read_again(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    create(path, "ads", ["score"])
    access = Access(path)
    before = access.watched.content
    access.watched.refresh()
    assert access.watched.content is before


def test_the_table_names_known_scopes_alone() -> None:
    assert set(HTTP.values()) | set(RPC.values()) == SCOPES - {"metrics"} | {"metrics", "any", "open"}
    assert rpc_scope("/livebed.v1.ModelService/ActivateVersion") == "admin"
