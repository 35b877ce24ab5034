CREATE TABLE extra (a);
