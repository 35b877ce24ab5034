UPDATE examples SET time = 'x', sealed = 'y';
