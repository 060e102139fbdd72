! The module mpi_f08: handles and statuses are types, ierror may be left out. Prints "answer" and a sum.
program module_f08
   use mpi_f08
   implicit none
   type(MPI_Request) :: requests(2)
   type(MPI_Status) :: status, statuses(2)
   type(MPI_Comm) :: copy, ring
   type(MPI_Datatype) :: pair
   integer :: rank, size, numbers(4), got(4), total, length, count, from(1), to(1)
   logical :: has_weights
   character(len=MPI_MAX_OBJECT_NAME) :: name
   call MPI_Init()
   call MPI_Comm_rank(MPI_COMM_WORLD, rank)
   call MPI_Comm_size(MPI_COMM_WORLD, size)
   call MPI_Comm_dup(MPI_COMM_WORLD, copy)
   call MPI_Comm_set_name(copy, 'copied')
   call MPI_Comm_get_name(copy, name, length)
   if (name /= 'copied' .or. length /= 6) error stop 'Comm_get_name'
   call MPI_Type_contiguous(2, MPI_INTEGER, pair)
   call MPI_Type_commit(pair)
   numbers = [rank, 2, 3, 4]
   call MPI_Irecv(got, 2, pair, modulo(rank - 1, size), 7, copy, requests(1))
   call MPI_Isend(numbers, 2, pair, modulo(rank + 1, size), 7, copy, requests(2))
   call MPI_Waitall(2, requests, statuses)
   if (statuses(1)%MPI_SOURCE /= modulo(rank - 1, size) .or. statuses(1)%MPI_TAG /= 7) error stop 'Waitall'
   if (requests(1) /= MPI_REQUEST_NULL) error stop 'requests'
   call MPI_Get_count(statuses(1), pair, count)
   if (count /= 2) error stop 'Get_count'
   call MPI_Sendrecv(numbers, 4, MPI_INTEGER, rank, 8, got, 4, MPI_INTEGER, rank, 8, copy, status)
   if (status%MPI_TAG /= 8) error stop 'Sendrecv'
   total = sum(got)
   call MPI_Allreduce(MPI_IN_PLACE, total, 1, MPI_INTEGER, MPI_SUM, copy)
   from = rank
   to = modulo(rank + 1, size)
   call MPI_Dist_graph_create(copy, 1, from, [1], to, MPI_UNWEIGHTED, MPI_INFO_NULL, .false., ring)
   call MPI_Dist_graph_neighbors_count(ring, length, count, has_weights)
   if (length /= 1 .or. count /= 1 .or. has_weights) error stop 'Dist_graph_neighbors_count'
   call MPI_Dist_graph_neighbors(ring, 1, from, MPI_UNWEIGHTED, 1, to, MPI_UNWEIGHTED)
   if (from(1) /= modulo(rank - 1, size) .or. to(1) /= modulo(rank + 1, size)) error stop 'Dist_graph_neighbors'
   call MPI_Comm_free(ring)
   call MPI_Dist_graph_create(copy, 0, from, [0], to, MPI_WEIGHTS_EMPTY, MPI_INFO_NULL, .false., ring)
   call MPI_Dist_graph_neighbors_count(ring, length, count, has_weights)
   if (length /= 0 .or. count /= 0 .or. .not. has_weights) error stop 'Dist_graph_create without edges'
   call MPI_Comm_free(ring)
   call MPI_Type_free(pair)
   call MPI_Comm_free(copy)
   call MPI_Finalize()
   if (rank == 0) print '(a,i0)', 'answer ', total
end program
