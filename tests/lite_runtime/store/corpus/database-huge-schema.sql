PRAGMA writable_schema = ON;
UPDATE sqlite_master SET sql = sql || printf('%.*c', 100000, ' ') WHERE name = 'store';
