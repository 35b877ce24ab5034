ALTER TABLE examples ADD COLUMN more BLOB AS (zeroblob(900000000));
