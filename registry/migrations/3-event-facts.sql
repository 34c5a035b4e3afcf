-- The numbers of an event, for programs: JSON.

ALTER TABLE events ADD COLUMN facts TEXT;
