-- Times are seconds since 1970, of events milliseconds. Secrets are not here: of a token, only the SHA-256 of its secret.

CREATE TABLE tokens (
    id          BLOB PRIMARY KEY,
    secret_hash BLOB NOT NULL,
    made        INTEGER NOT NULL,
    expires     INTEGER NOT NULL,
    revoked     INTEGER,
    uses        INTEGER NOT NULL DEFAULT 0
) STRICT, WITHOUT ROWID;

CREATE TABLE nodes (
    -- The UUID that the host made.
    id        TEXT PRIMARY KEY,
    name      TEXT NOT NULL,
    state     TEXT NOT NULL CHECK (state IN ('pending', 'approved', 'left')),
    -- Of the key with which a pending node asks, and what people compare.
    asked_key BLOB,
    code      TEXT,
    -- JSON: what it runs, and where it may be reached.
    build     TEXT NOT NULL,
    addresses TEXT NOT NULL DEFAULT '[]',
    -- Where the orchestrator last reached it.
    reached   TEXT,
    asked     INTEGER NOT NULL,
    last_seen INTEGER
) STRICT, WITHOUT ROWID;

-- A name is free again when its node has left.
CREATE UNIQUE INDEX node_names ON nodes (name) WHERE state <> 'left';

CREATE TABLE certificates (
    fingerprint BLOB PRIMARY KEY,
    node        TEXT NOT NULL REFERENCES nodes (id),
    -- Of the public key, by which a node is known again after its certificate has expired.
    key         BLOB NOT NULL,
    serial      TEXT NOT NULL,
    issued      INTEGER NOT NULL,
    expires     INTEGER NOT NULL
) STRICT, WITHOUT ROWID;

CREATE INDEX certificates_of_nodes ON certificates (node, issued);

CREATE TABLE events (
    id   INTEGER PRIMARY KEY AUTOINCREMENT,
    at   INTEGER NOT NULL,
    kind TEXT NOT NULL,
    -- The node's name at that time.
    node TEXT,
    text TEXT NOT NULL
) STRICT;

CREATE TABLE settings (
    name  TEXT PRIMARY KEY,
    value TEXT NOT NULL
) STRICT, WITHOUT ROWID;
