-- Plans, which are never changed, and which of them was desired since when: the history to go back in.

CREATE TABLE plans (
    id     INTEGER PRIMARY KEY AUTOINCREMENT,
    made   INTEGER NOT NULL,
    -- Of the model that it is for: SHA-256 in hex.
    model  TEXT NOT NULL,
    origin TEXT NOT NULL,
    -- JSON, which only those read who make plans.
    plan   TEXT NOT NULL
) STRICT;

CREATE TABLE deployments (
    id     INTEGER PRIMARY KEY AUTOINCREMENT,
    at     INTEGER NOT NULL,
    plan   INTEGER NOT NULL REFERENCES plans (id),
    reason TEXT NOT NULL
) STRICT;
