UPDATE examples SET sealed = zeroblob(30000000) WHERE id = 1;
