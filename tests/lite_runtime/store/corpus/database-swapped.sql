UPDATE examples SET sealed = (SELECT sealed FROM examples AS o WHERE o.id = 2) WHERE id = 1;
