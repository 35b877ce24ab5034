ALTER TABLE examples RENAME TO real;
CREATE VIEW examples AS SELECT id, time, randomblob(200000000) AS sealed FROM real;
