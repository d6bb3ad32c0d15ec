"""
A small Hugging Face Hub on localhost, for the real `huggingface_hub` client.

It keeps repositories as git does, in memory: commits with a parent and a tree, branches that point to them, contents
by their hash. A commit takes effect as a whole or not at all, and only with large files that were uploaded before.
Tokens stand for users, private repositories hide from others, and every request is recorded. What the client of the
installed version asks for is answered as the Hub does; anything else is 404.
"""

import base64
import hashlib
import json
import re
import threading
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

import yaml
from huggingface_hub.utils import validate_repo_id


LARGE_FILE_ENDINGS = (".safetensors", ".bin", ".pt", ".pth", ".png")
DATE = "2026-01-02T03:04:05.000Z"


@dataclass
class Blob:
    """
    Content of a file.

    Args:
        data (`bytes`): The content.
        large (`bool`): Whether it is kept by LFS.
        size (`int`, *optional*): What the server says is its size, by default the truth.
    """

    data: bytes
    large: bool
    size: int | None = None

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.data).hexdigest()

    @property
    def oid(self) -> str:
        """What the client compares: LFS's hash, or git's."""
        return self.sha256 if self.large else hashlib.sha1(b"blob %d\0" % len(self.data) + self.data).hexdigest()

    @property
    def length(self) -> int:
        return len(self.data) if self.size is None else self.size


@dataclass
class Commit:
    """A state of a repository: its files by path, and the commit before it."""

    title: str
    parent: str | None
    tree: dict[str, Blob]

    @property
    def sha(self) -> str:
        entries = json.dumps([self.title, self.parent, sorted((path, blob.oid) for path, blob in self.tree.items())])
        return hashlib.sha1(entries.encode()).hexdigest()


@dataclass
class Repo:
    """
    A repository.

    Args:
        owner (`str`): User who may read and write it.
        name (`str`): Name without the owner.
        private (`bool`): Whether others may not see it.
        gated (`bool`): Whether others may see it, but not its files.
    """

    owner: str
    name: str
    private: bool = False
    gated: bool = False
    commits: dict[str, Commit] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    large_files: dict[str, bytes] = field(default_factory=dict)
    downloads: int = 0

    def __post_init__(self):
        self.put("main", Commit("initial commit", None, {".gitattributes": Blob(b"*.bin filter=lfs\n", False)}))

    @property
    def id(self) -> str:
        return f"{self.owner}/{self.name}"

    def put(self, branch: str, commit: Commit) -> str:
        self.commits[commit.sha] = commit
        self.branches[branch] = commit.sha
        return commit.sha

    def find(self, revision: str) -> str | None:
        """The hash of a commit that a branch or a hash names."""
        return self.branches.get(revision, revision if revision in self.commits else None)

    def files(self, revision: str = "main") -> dict[str, bytes]:
        """Contents by path, without what every repository begins with."""
        tree = self.commits[self.branches[revision]].tree
        return {path: blob.data for path, blob in tree.items() if path != ".gitattributes"}

    def titles(self, revision: str = "main") -> list[str]:
        """Messages of the commits, the last one first."""
        sha, titles = self.branches[revision], []
        while sha is not None:
            titles.append(self.commits[sha].title)
            sha = self.commits[sha].parent
        return titles

    def metadata(self, revision: str = "main") -> dict:
        card = self.files(revision).get("README.md", b"").decode()
        match = re.match(r"---\n(.*?)\n---\n", card, flags=re.DOTALL)
        try:
            return (yaml.safe_load(match[1]) or {}) if match else {}
        except yaml.YAMLError:
            return {}

    def tags(self) -> list[str]:
        """What the Hub derives from the card."""
        data = self.metadata()
        models = data.get("base_model") or []
        models = [models] if isinstance(models, str) else models
        tags = [*(data.get("tags") or []), *(f"base_model:{model}" for model in models)]
        return [*tags, data["library_name"]] if "library_name" in data else tags


@dataclass
class Request:
    """A request, and what it was answered."""

    method: str
    path: str
    user: str | None
    status: int = 0


class HubServer:
    """
    The server.

    Attributes:
        endpoint (`str`): Its address, for `HF_ENDPOINT`.
        users (`dict[str, str]`): Users by token.
        repos (`dict[tuple[str, str], Repo]`): Repositories by type and id.
        requests (`list[Request]`): Requests so far.
    """

    def __init__(self):
        self.users = {"hf_alice": "alice", "hf_bob": "bob"}
        self.repos: dict[tuple[str, str], Repo] = {}
        self.requests: list[Request] = []
        self.lock = threading.Lock()
        self._faults: list[tuple[str, str, Callable]] = []
        handler = type("Handler", (_Handler,), {"hub": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"
        # Another host for the client, to which no token may be sent.
        self.storage = f"http://localhost:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *error):
        self._server.shutdown()
        self._server.server_close()

    def create(self, repo_id: str, repo_type: str = "model", **options) -> Repo:
        """Make a repository, as its owner would."""
        repo = Repo(*repo_id.split("/"), **options)
        self.repos[repo_type, repo_id] = repo
        return repo

    def add(self, repo_id: str, files: dict[str, bytes | Blob], revision: str = "main", title: str = "by hand") -> str:
        """Commit files to a model repository, as its owner would."""
        repo = self.repos["model", repo_id]
        before = repo.branches[revision]
        blobs = {path: data if isinstance(data, Blob) else Blob(data, False) for path, data in files.items()}
        return repo.put(revision, Commit(title, before, {**repo.commits[before].tree, **blobs}))

    def repo(self, repo_id: str, repo_type: str = "model") -> Repo:
        return self.repos[repo_type, repo_id]

    @contextmanager
    def fault(self, method: str, pattern: str, act: Callable):
        """Let `act`, called with the handler, answer requests whose path matches, unless it returns true."""
        self._faults.append((method, pattern, act))
        try:
            yield
        finally:
            self._faults.pop()

    def asked(self, method: str, pattern: str) -> list[Request]:
        """Requests whose path matches."""
        return [one for one in self.requests if one.method == method and re.search(pattern, one.path)]


def drop(handler) -> None:
    """Break the connection without an answer, whatever was sent."""
    handler.close_connection = True
    handler.connection.close()


class HubError(Exception):
    def __init__(self, status, message, code=None, commit=None):
        self.status, self.message, self.code, self.commit = status, message, code, commit


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: HubServer

    def log_message(self, *args):
        pass

    def do_GET(self):
        self._answer("GET")

    def do_HEAD(self):
        self._answer("HEAD")

    def do_POST(self):
        self._answer("POST")

    def do_PUT(self):
        self._answer("PUT")

    def _answer(self, method):
        url = urlsplit(self.path)
        self.query = {name: values for name, values in parse_qs(url.query).items()}
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        self.user = self.hub.users.get(token)
        self.request_record = Request(method, self.path, self.user)
        self.hub.requests.append(self.request_record)
        self._body = None
        for wanted, pattern, act in list(self.hub._faults):
            if method == wanted and re.search(pattern, url.path) and not act(self):
                return
        self.body()
        try:
            if token and self.user is None:
                raise HubError(401, "Invalid credentials in Authorization header")
            # One at a time, as a database's transactions.
            with self.hub.lock:
                self._route(method, url.path)
        except HubError as error:
            headers = {"X-Error-Message": error.message}
            if error.code:
                headers["X-Error-Code"] = error.code
            if error.commit:
                headers["X-Repo-Commit"] = error.commit
            self.send(error.status, {"error": error.message}, headers)

    def body(self) -> bytes:
        if self._body is None:
            self._body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            if self.headers.get("Transfer-Encoding") == "chunked":
                parts = []
                while size := int(self.rfile.readline().split(b";")[0], 16):
                    parts.append(self.rfile.read(size))
                    self.rfile.readline()
                self.rfile.readline()
                self._body = b"".join(parts)
        return self._body

    def send(self, status, content=b"", headers=None):
        self.request_record.status = status
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        headers = {"Content-Type": "application/json", "Content-Length": str(len(data)), **(headers or {})}
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def _route(self, method, path):
        for wanted, pattern, act in _ROUTES:
            match = re.fullmatch(pattern, path)
            if match and wanted in (method, "GET" if method == "HEAD" else method):
                return act(self, **{name: unquote(value or "") for name, value in match.groupdict().items()})
        raise HubError(404, f"There is no {method} {path}")

    # Repositories

    def find(self, owner, name, repo_type="model", write=False, files=False) -> Repo:
        repo = self.hub.repos.get((repo_type, f"{owner}/{name}"))
        if repo is None or (repo.private and repo.owner != self.user):
            # Without a token the Hub does not say which of the two it is.
            raise HubError(404 if self.user else 401, "Repository not found", "RepoNotFound")
        if write and repo.owner != self.user:
            raise HubError(403 if self.user else 401, "You have read access but not the required permissions")
        if files and repo.gated and repo.owner != self.user:
            raise HubError(403 if self.user else 401, f"Access to model {repo.id} is restricted", "GatedRepo")
        return repo

    def commit_of(self, repo, revision) -> str:
        sha = repo.find(revision or "main")
        if sha is None:
            raise HubError(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return sha

    def whoami(self):
        if self.user is None:
            raise HubError(401, "Invalid username or password.")
        self.send(200, {"type": "user", "name": self.user, "orgs": [], "auth": {"accessToken": {"role": "write"}}})

    def create_repo(self):
        if self.user is None:
            raise HubError(401, "Invalid username or password.")
        wanted = json.loads(self.body())
        owner = wanted.get("organization") or self.user
        if owner != self.user:
            raise HubError(403, f"You don't have the rights to create a model under the namespace {owner}")
        repo_type, repo_id = wanted.get("type") or "model", f"{owner}/{wanted['name']}"
        url = f"{self.hub.endpoint}/{'' if repo_type == 'model' else repo_type + 's/'}{repo_id}"
        if (repo_type, repo_id) in self.hub.repos:
            return self.send(409, {"error": "You already created this model repo", "url": url})
        self.hub.create(repo_id, repo_type, private=wanted.get("visibility") == "private")
        self.send(200, {"url": url, "name": repo_id})

    def info(self, types, owner, name, revision=None):
        repo = self.find(owner, name, types[:-1])
        sha = self.commit_of(repo, revision)
        self.send(200, self.describe(repo, sha))

    def tree(self, owner, name, revision):
        repo = self.find(owner, name)
        entries = []
        for path, blob in sorted(repo.commits[self.commit_of(repo, revision)].tree.items()):
            entries.append({"type": "file", "path": path, "size": blob.length, "oid": blob.oid})
            if blob.large:
                entries[-1]["lfs"] = {"oid": blob.sha256, "size": blob.length, "pointerSize": 130}
        self.send(200, entries)

    def describe(self, repo, sha):
        siblings = []
        for path, blob in sorted(repo.commits[sha].tree.items()):
            sibling = {"rfilename": path}
            if "blobs" in self.query:
                sibling |= {"size": blob.length, "blobId": blob.oid}
                if blob.large:
                    sibling["lfs"] = {"size": blob.length, "sha256": blob.sha256, "pointerSize": 130}
            siblings.append(sibling)
        return {
            "id": repo.id,
            "modelId": repo.id,
            "author": repo.owner,
            "sha": sha,
            "private": repo.private,
            "gated": "manual" if repo.gated else False,
            "lastModified": DATE,
            "createdAt": DATE,
            "downloads": repo.downloads,
            "likes": 0,
            "tags": repo.tags(),
            "siblings": siblings,
        }

    def list_models(self):
        def listed(repo):
            return (
                (not repo.private or repo.owner == self.user)
                and set(self.query.get("filter", ())) <= set(repo.tags())
                and all(text.lower() in repo.id.lower() for text in self.query.get("search", ()))
                and self.query.get("author", [repo.owner]) == [repo.owner]
            )

        repos = [repo for (repo_type, _), repo in self.hub.repos.items() if repo_type == "model" and listed(repo)]
        if self.query.get("sort") == ["downloads"]:
            repos.sort(key=lambda repo: -repo.downloads)
        limit = int(self.query.get("limit", ["1000"])[0])
        self.send(200, [self.describe(repo, repo.branches["main"]) for repo in repos[:limit]])

    def create_branch(self, owner, name, branch):
        repo = self.find(owner, name, write=True)
        if branch in repo.branches:
            raise HubError(409, f"Reference already exists: {branch}")
        start = json.loads(self.body() or b"{}").get("startingPoint") or "main"
        repo.branches[branch] = self.commit_of(repo, start)
        self.send(200, b"OK")

    # Uploads

    def validate(self):
        content = json.loads(self.body())["content"]
        errors = []
        match = re.match(r"---\s*\n(.*?)\n---", content, flags=re.DOTALL)
        try:
            data = (yaml.safe_load(match[1]) or {}) if match else {}
        except yaml.YAMLError as error:
            data, errors = {}, [f"Invalid YAML: {error}"]
        for name in ("base_model", "datasets"):
            values = data.get(name) or []
            for value in [values] if isinstance(values, str) else values:
                try:
                    validate_repo_id(value)
                except ValueError:
                    errors.append(
                        f'"{name}" with value "{value}" is not valid. Use a model id from https://hf.co/models.'
                    )
        if not isinstance(data.get("tags") or [], list):
            errors.append('"tags" must be an array')
        if not isinstance(data.get("library_name", ""), str):
            errors.append('"library_name" must be a string')
        messages = [{"message": error} for error in errors]
        self.send(400 if errors else 200, {"errors": messages, "warnings": []})

    def preupload(self, owner, name, revision):
        repo = self.find(owner, name, write="create_pr" not in self.query)
        tree = repo.commits[self.commit_of(repo, revision)].tree
        files = []
        for entry in json.loads(self.body())["files"]:
            binary = b"\0" in base64.b64decode(entry["sample"])
            large = binary or entry["path"].endswith(LARGE_FILE_ENDINGS) or entry["size"] > 10 * 2**20
            known = tree.get(entry["path"])
            files.append(
                {
                    "path": entry["path"],
                    "uploadMode": "lfs" if large else "regular",
                    "shouldIgnore": False,
                    "oid": known.oid if known else None,
                }
            )
        self.send(200, {"files": files})

    def large_batch(self, owner, name):
        repo = self.find(owner, name)
        objects = []
        for entry in json.loads(self.body())["objects"]:
            answer = {"oid": entry["oid"], "size": entry["size"]}
            if entry["oid"] not in repo.large_files:
                href = f"{self.hub.storage}/upload/{repo.id}/{entry['oid']}"
                answer["actions"] = {
                    "upload": {"href": href},
                    "verify": {"href": f"{self.hub.endpoint}/verify/{repo.id}"},
                }
            objects.append(answer)
        self.send(200, {"transfer": "basic", "objects": objects})

    def check_signed(self):
        """Storage takes addresses that the Hub has signed, and a token beside it is an error."""
        if "Authorization" in self.headers or not self.headers["Host"].startswith("localhost"):
            raise HubError(400, "Only one auth mechanism allowed")

    def large_upload(self, owner, name, oid):
        self.check_signed()
        if hashlib.sha256(self.body()).hexdigest() != oid:
            raise HubError(400, "The content does not match its hash")
        self.hub.repos["model", f"{owner}/{name}"].large_files[oid] = self.body()
        self.send(200)

    def large_verify(self, owner, name):
        wanted = json.loads(self.body())
        data = self.find(owner, name).large_files.get(wanted["oid"])
        if data is None or len(data) != wanted["size"]:
            raise HubError(404, "Not uploaded")
        self.send(200, {"message": "ok"})

    def commit(self, owner, name, revision):
        create_pr = "create_pr" in self.query
        repo = self.find(owner, name, write=not create_pr)
        if self.user is None:
            raise HubError(401, "Invalid username or password.")
        before = self.commit_of(repo, revision)
        if revision not in repo.branches:
            raise HubError(400, "A commit needs a branch")
        tree = dict(repo.commits[before].tree)
        header = None
        for line in self.body().splitlines():
            entry = json.loads(line)
            value = entry["value"]
            if entry["key"] == "header":
                header = value
                if value.get("parentCommit") not in (None, before):
                    raise HubError(412, "A commit has happened since. Please refresh and try again.")
            elif entry["key"] == "file":
                tree[value["path"]] = Blob(base64.b64decode(value["content"]), False)
            elif entry["key"] == "lfsFile":
                if value["oid"] not in repo.large_files:
                    raise HubError(400, f"{value['path']} has not been uploaded")
                tree[value["path"]] = Blob(repo.large_files[value["oid"]], True)
            elif entry["key"] == "deletedFile":
                del tree[value["path"]]
            else:
                raise HubError(400, f"Unknown operation {entry['key']}")
        commit = Commit(header["summary"], before, tree)
        answer = {"success": True, "commitUrl": f"{self.hub.endpoint}/{repo.id}/commit/{commit.sha}"}
        if create_pr:
            number = 1 + sum(branch.startswith("refs/pr/") for branch in repo.branches)
            revision = f"refs/pr/{number}"
            answer["pullRequestUrl"] = f"{self.hub.endpoint}/{repo.id}/discussions/{number}"
        self.send(200, {**answer, "commitOid": repo.put(revision, commit)})

    # Downloads

    def resolve(self, types, owner, name, revision, path):
        repo = self.find(owner, name, types.strip("/")[:-1] or "model", files=True)
        sha = self.commit_of(repo, revision)
        blob = repo.commits[sha].tree.get(path)
        if blob is None:
            raise HubError(404, "Entry not found", "EntryNotFound", commit=sha)
        headers = {"X-Repo-Commit": sha, "ETag": f'"{blob.oid}"', "Content-Type": "application/octet-stream"}
        if blob.large:
            location = f"{self.hub.storage}/large/{repo.id}/{blob.sha256}"
            headers |= {"X-Linked-Size": str(blob.length), "X-Linked-Etag": f'"{blob.sha256}"', "Location": location}
            return self.send(302, b"", headers)
        if self.command == "HEAD":
            headers["Content-Length"] = str(blob.length)
        self.send(200, blob.data, headers)

    def large_download(self, owner, name, oid):
        self.check_signed()
        data = self.hub.repos["model", f"{owner}/{name}"].large_files[oid]
        self.send(200, data, {"ETag": f'"{oid}"', "Content-Type": "application/octet-stream"})


_ID = r"(?P<owner>[^/]+)/(?P<name>[^/]+)"
_ROUTES = [
    ("GET", "/api/whoami-v2", _Handler.whoami),
    ("GET", "/api/telemetry/.*", lambda handler: handler.send(200, {})),
    ("POST", "/api/repos/create", _Handler.create_repo),
    ("POST", "/api/validate-yaml", _Handler.validate),
    ("GET", "/api/models", _Handler.list_models),
    ("GET", f"/api/(?P<types>models|datasets|spaces)/{_ID}", _Handler.info),
    ("GET", f"/api/(?P<types>models|datasets|spaces)/{_ID}/revision/(?P<revision>[^/]+)", _Handler.info),
    ("GET", f"/api/models/{_ID}/tree/(?P<revision>[^/]+)", _Handler.tree),
    ("POST", f"/api/models/{_ID}/branch/(?P<branch>[^/]+)", _Handler.create_branch),
    ("POST", f"/api/models/{_ID}/preupload/(?P<revision>[^/]+)", _Handler.preupload),
    ("POST", f"/api/models/{_ID}/commit/(?P<revision>[^/]+)", _Handler.commit),
    ("POST", rf"/{_ID}\.git/info/lfs/objects/batch", _Handler.large_batch),
    ("PUT", f"/upload/{_ID}/(?P<oid>[0-9a-f]+)", _Handler.large_upload),
    ("POST", f"/verify/{_ID}", _Handler.large_verify),
    ("GET", f"/large/{_ID}/(?P<oid>[0-9a-f]+)", _Handler.large_download),
    ("GET", f"(?P<types>|/datasets|/spaces)/{_ID}/resolve/(?P<revision>[^/]+)/(?P<path>.+)", _Handler.resolve),
]
