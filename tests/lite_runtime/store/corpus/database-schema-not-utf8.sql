PRAGMA writable_schema = ON;
UPDATE sqlite_master SET name = CAST(x'80ff' AS TEXT), sql = CAST(x'43524541544580ff' AS TEXT) WHERE name = 'store';
