UPDATE store SET layout = 7;
