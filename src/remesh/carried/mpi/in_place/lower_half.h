/* What a lower half offers: a struct of functions that its upper half knows, too. It is asked for once, at the start. */
#ifndef REMESH_LOWER_HALF_H
#define REMESH_LOWER_HALF_H

#include "halves.h"

const void *lower_functions(void);

#endif
