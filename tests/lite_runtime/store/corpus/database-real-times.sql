UPDATE examples SET time = 1e308;
