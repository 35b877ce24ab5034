"""What NumPy's functions and array methods emit; importing this fills the table."""

from archipel.frontend.numpy_functions import angles as angles
from archipel.frontend.numpy_functions import composed as composed
from archipel.frontend.numpy_functions import creation as creation
from archipel.frontend.numpy_functions import elementwise as elementwise
from archipel.frontend.numpy_functions import joining as joining
from archipel.frontend.numpy_functions import linear as linear
from archipel.frontend.numpy_functions import reductions as reductions
from archipel.frontend.numpy_functions import shapes as shapes
