UPDATE examples SET id = id - 1000;
