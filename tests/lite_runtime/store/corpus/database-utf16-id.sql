UPDATE store SET id = 'abc';
