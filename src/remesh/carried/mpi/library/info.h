/* Infos: ordered pairs of key and value. */
#ifndef REMESH_INFO_H
#define REMESH_INFO_H

#include "core.h"

/* The value of a key, or NULL; of no info too. */
INTERNAL const char *info_value(const Info *info, const char *key);
/* A copy that the caller owns; of NULL: an empty one. */
INTERNAL Info *copy_info(const Info *info);
/* Sets what is given of the hints of an object; the others stay. Source: MPI 4.1, sections 7.4.4, 12.2.7 and 14.2.8. */
INTERNAL void update_info(Info **held, const Info *given);
/* Sets or replaces a pair. */
INTERNAL void put_info(Info *info, const char *key, const char *value);
/* Makes what is behind the predefined handles, when the library is loaded. */
INTERNAL void make_predefined_infos(void);

#endif
