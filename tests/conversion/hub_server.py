"""A Hub of one process: the endpoints that `huggingface_hub` calls to make, fill, list and read a model repository.

Real HTTP over a local socket. Large files go to the store by their SHA-256 as on the Hub, and a commit names what is
there. A failure can be planned for any request, and every request is written down.
"""

import base64
import hashlib
import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit


TOKEN, USER = "hf_local", "user"
REPO = r"(?P<repo>[\w.-]+/[\w.-]+)"
FAILURES = ("500", "drop", "truncate")


@dataclass
class File:
    """A file of a commit; `sha256` says that it lies in the store."""

    content: bytes
    sha256: str | None = None

    @property
    def git_oid(self) -> str:
        """As git names it: of a large file, that of the pointer which stands for it."""
        content = self.content
        if self.sha256 is not None:
            pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{self.sha256}\nsize {len(content)}\n"
            content = pointer.encode()
        return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()

    @property
    def etag(self) -> str:
        return self.sha256 or self.git_oid


@dataclass
class Repo:
    """`commits`: by their names, oldest first, each the whole tree."""

    private: bool
    commits: dict[str, dict[str, File]] = field(default_factory=dict)

    def commit(self, tree: dict[str, File]) -> str:
        listed = "".join(f"{path} {file.git_oid}\n" for path, file in sorted(tree.items()))
        name = hashlib.sha1(f"{len(self.commits)}\n{listed}".encode()).hexdigest()
        self.commits[name] = tree
        return name

    @property
    def head(self) -> str:
        return next(reversed(self.commits))

    def tree(self, revision: str) -> tuple[str, dict[str, File]]:
        name = self.head if revision == "main" else revision
        return name, self.commits[name]


@dataclass
class Failure:
    pattern: str
    kind: str
    times: int
    skip: int
    after: int | None = None


@dataclass
class Hub:
    """What the server holds. `log`: (method, path, bytes of the body) of every request; `failures`: still to come."""

    endpoint: str = ""
    repos: dict[str, Repo] = field(default_factory=dict)
    store: dict[str, bytes] = field(default_factory=dict)
    log: list[tuple[str, str, int]] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    on_stored: Callable[[str], None] | None = None
    lock: threading.RLock = field(default_factory=threading.RLock)

    def fail(self, pattern: str, kind: str, *, times: int = 1, skip: int = 0, after: int | None = None) -> None:
        """Plans a failure of the next `times` requests whose "METHOD /path" matches `pattern`, but for the first `skip`.

        `kind`: "500"; "drop": the connection ends while the body of the request is read; "truncate": the answer ends
        after `after` of its bytes (default: half of them).
        """
        if kind not in FAILURES:
            raise ValueError(f"kind: expected one of {FAILURES}, got {kind!r}")
        self.failures.append(Failure(pattern, kind, times, skip, after))

    def failure(self, request: str) -> Failure | None:
        with self.lock:
            for failure in self.failures:
                if re.search(failure.pattern, request):
                    if failure.skip:
                        failure.skip -= 1
                    elif failure.times:
                        failure.times -= 1
                        return failure
        return None

    def requests(self, pattern: str) -> list[tuple[str, str, int]]:
        """Those of the log whose "METHOD /path" matches."""
        return [one for one in self.log if re.search(pattern, f"{one[0]} {one[1]}")]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # or every answer waits 40 ms between its head and its body
    hub: Hub
    planned: Failure | None

    def do_GET(self) -> None:
        self._handle()

    do_HEAD = do_POST = do_PUT = do_GET

    def log_message(self, *arguments) -> None:
        """The log is `Hub.log`."""

    def _handle(self) -> None:
        self.path = unquote(urlsplit(self.path).path)
        size = int(self.headers.get("Content-Length") or 0)
        request = f"{self.command} {self.path}"
        self.planned = self.hub.failure(request)
        if self.planned is not None and self.planned.kind == "drop":
            self.rfile.read(size // 2)
            self.close_connection = True
            self.connection.close()
            return
        body = self.rfile.read(size)
        with self.hub.lock:
            self.hub.log.append((self.command, self.path, size))
        if self.planned is not None and self.planned.kind == "500":
            self._json({"error": "planned"}, status=500)
            return
        for pattern, method in ROUTES:
            if found := re.fullmatch(pattern, request):
                if self._may(found.groupdict().get("repo")):
                    method(self, body, **found.groupdict())
                return
        self._json({"error": f"no such endpoint: {request}"}, status=404)

    def _may(self, repo: str | None) -> bool:
        """Whether the sender may do this; if not, the answer is on its way."""
        known = self.headers.get("Authorization") == f"Bearer {TOKEN}"
        if repo is None:
            return True
        missing = repo not in self.hub.repos
        hidden = not missing and self.hub.repos[repo].private
        writes = self.command in ("POST", "PUT")
        if missing or ((hidden or writes) and not known):
            self._json({"error": "Repository not found"}, status=404 if known else 401, code="RepoNotFound")
            return False
        return True

    def _json(self, content: object, *, status: int = 200, code: str | None = None) -> None:
        headers = {"Content-Type": "application/json"} | ({"X-Error-Code": code} if code else {})
        self._send(json.dumps(content).encode(), headers, status=status)

    def _send(self, content: bytes, headers: dict[str, str], *, status: int = 200) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        if self.planned is not None and self.planned.kind == "truncate":
            after = len(content) // 2 if self.planned.after is None else self.planned.after
            self.wfile.write(content[:after])
            self.close_connection = True
            return
        self.wfile.write(content)

    def create(self, body: bytes) -> None:
        wanted = json.loads(body)
        repo = f"{wanted['organization'] or USER}/{wanted['name']}"
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self._json({"error": "Invalid token"}, status=401)
            return
        url = f"{self.hub.endpoint}/{repo}"
        with self.hub.lock:
            if repo in self.hub.repos:
                self._json({"error": "You already created this model repo", "url": url}, status=409)
                return
            private = wanted.get("private") or wanted.get("visibility") == "private"
            self.hub.repos[repo] = Repo(private=bool(private))
            self.hub.repos[repo].commit({".gitattributes": File(b"*.safetensors filter=lfs\n")})
        self._json({"url": url})

    def info(self, body: bytes, repo: str, revision: str | None = None) -> None:
        held = self._revision(repo, revision or "main")
        if held is not None:
            name, tree = held
            files = [{"rfilename": path, "blobId": tree[path].git_oid} for path in sorted(tree)]
            private = self.hub.repos[repo].private
            self._json({"id": repo, "sha": name, "private": private, "siblings": files, "tags": []})

    def tree(self, body: bytes, repo: str, revision: str, folder: str | None) -> None:
        held = self._revision(repo, revision)
        if held is None:
            return
        entries = []
        for path, file in sorted(held[1].items()):
            entry = {"type": "file", "path": path, "size": len(file.content), "oid": file.git_oid}
            if file.sha256 is not None:
                entry["lfs"] = {"oid": file.sha256, "size": len(file.content), "pointerSize": 134}
            if folder is None or path.startswith(f"{folder}/"):
                entries.append(entry)
        self._json(entries)

    def preupload(self, body: bytes, repo: str, revision: str) -> None:
        tree = self.hub.repos[repo].tree(revision)[1]
        files = []
        for wanted in json.loads(body)["files"]:
            path = wanted["path"]
            large = path.endswith(".safetensors") or wanted["size"] > 10_000_000
            answer = {"path": path, "uploadMode": "lfs" if large else "regular", "shouldIgnore": False}
            if path in tree:
                answer["oid"] = tree[path].etag
            files.append(answer)
        self._json({"files": files})

    def lfs_batch(self, body: bytes, repo: str) -> None:
        objects = []
        for wanted in json.loads(body)["objects"]:
            if wanted["oid"] not in self.hub.store:
                actions = {
                    "upload": {"href": f"{self.hub.endpoint}/store/{wanted['oid']}"},
                    "verify": {"href": f"{self.hub.endpoint}/{repo}.git/info/lfs/verify"},
                }
                wanted = {**wanted, "actions": actions}
            objects.append(wanted)
        self._json({"transfer": "basic", "objects": objects})

    def lfs_put(self, body: bytes, oid: str) -> None:
        if hashlib.sha256(body).hexdigest() != oid:
            self._json({"error": "not the bytes of this name"}, status=400)
            return
        with self.hub.lock:
            self.hub.store[oid] = body
        self._json({})
        if self.hub.on_stored is not None:
            self.hub.on_stored(oid)

    def lfs_verify(self, body: bytes, repo: str) -> None:
        wanted = json.loads(body)
        right = len(self.hub.store.get(wanted["oid"], b"")) == wanted["size"]
        self._json({}, status=200 if right else 404)

    def commit(self, body: bytes, repo: str, revision: str) -> None:
        lines = [json.loads(line) for line in body.splitlines()]
        held = self.hub.repos[repo]
        with self.hub.lock:
            for line in lines:
                if line["key"] == "header" and line["value"].get("parentCommit") not in (None, held.head):
                    self._json({"error": "The branch has moved"}, status=412)
                    return
                if line["key"] == "lfsFile" and line["value"]["oid"] not in self.hub.store:
                    self._json({"error": f"{line['value']['path']} was not uploaded"}, status=400)
                    return
            tree = dict(held.tree(revision)[1])
            for line in lines:
                self._apply(tree, line["key"], line["value"])
            name = held.commit(tree)
        url = f"{self.hub.endpoint}/{repo}/commit/{name}"
        self._json({"success": True, "commitOid": name, "commitUrl": url})

    def _apply(self, tree: dict[str, File], key: str, value: dict) -> None:
        if key == "file":
            tree[value["path"]] = File(base64.b64decode(value["content"]))
        elif key == "lfsFile":
            tree[value["path"]] = File(self.hub.store[value["oid"]], value["oid"])
        elif key == "deletedFile":
            del tree[value["path"]]

    def validate_yaml(self, body: bytes) -> None:
        self._json({"errors": [], "warnings": []})

    def resolve(self, body: bytes, repo: str, revision: str, path: str) -> None:
        held = self._revision(repo, revision)
        if held is None:
            return
        name, tree = held
        if path not in tree:
            headers = {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": name}
            self._send(b"Entry not found", headers, status=404)
            return
        content = tree[path].content
        headers = {"ETag": f'"{tree[path].etag}"', "X-Repo-Commit": name, "Accept-Ranges": "bytes"}
        asked = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range") or "")
        if asked is None:
            self._send(content, headers)
            return
        start = int(asked[1])
        headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        self._send(content[start:], headers, status=206)

    def _revision(self, repo: str, revision: str) -> tuple[str, dict[str, File]] | None:
        try:
            return self.hub.repos[repo].tree(revision)
        except KeyError:
            self._json({"error": f"Invalid rev id: {revision}"}, status=404, code="RevisionNotFound")
            return None

    def whoami(self, body: bytes) -> None:
        self._json({"name": USER, "type": "user", "orgs": []})


ROUTES = (
    (r"POST /api/repos/create", Handler.create),
    (r"POST /api/validate-yaml", Handler.validate_yaml),
    (r"GET /api/whoami-v2", Handler.whoami),
    (rf"GET /api/models/{REPO}", Handler.info),
    (rf"GET /api/models/{REPO}/revision/(?P<revision>[^/]+)", Handler.info),
    (rf"GET /api/models/{REPO}/tree/(?P<revision>[^/]+)(?:/(?P<folder>.+))?", Handler.tree),
    (rf"POST /api/models/{REPO}/preupload/(?P<revision>[^/]+)", Handler.preupload),
    (rf"POST /api/models/{REPO}/commit/(?P<revision>[^/]+)", Handler.commit),
    (rf"POST /{REPO}.git/info/lfs/objects/batch", Handler.lfs_batch),
    (rf"POST /{REPO}.git/info/lfs/verify", Handler.lfs_verify),
    (r"PUT /store/(?P<oid>[0-9a-f]{64})", Handler.lfs_put),
    (rf"(?:GET|HEAD) /{REPO}/resolve/(?P<revision>[^/]+)/(?P<path>.+)", Handler.resolve),
)


@contextmanager
def serving() -> Iterator[Hub]:
    """A hub that answers at `Hub.endpoint` until the end of the block."""
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("HubHandler", (Handler,), {"hub": hub}))
    server.daemon_threads = True
    hub.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
