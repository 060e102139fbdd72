! One call of every kind whose arguments differ from those of C, by mpif.h or, with -DMODULE, by the module mpi.
! Prints "answer" and a sum if all is as MPI says: `every_kind [STEPS [PAUSE_US]]`.
module callbacks
   implicit none
   integer :: num_freed = 0, num_deleted = 0
contains
   subroutine add_and_one(in, inout, length, datatype)
      integer :: length, datatype
      integer :: in(length), inout(length)
      inout = in + inout + 1 + 0 * datatype
   end subroutine

   subroutine copy_attribute(comm, keyval, extra, value, copied, flag, ierror)
#ifdef MODULE
      use mpi
#else
      include 'mpif.h'
#endif
      integer :: comm, keyval, ierror
      integer(kind=MPI_ADDRESS_KIND) :: extra, value, copied
      logical :: flag
      copied = value + extra
      flag = .true.
      ierror = MPI_SUCCESS + 0 * (comm + keyval)
   end subroutine

   subroutine delete_attribute(comm, keyval, value, extra, ierror)
#ifdef MODULE
      use mpi
#else
      include 'mpif.h'
#endif
      integer :: comm, keyval, ierror
      integer(kind=MPI_ADDRESS_KIND) :: extra, value
      num_deleted = num_deleted + 1
      ierror = MPI_SUCCESS + 0 * int(comm + keyval + extra + value)
   end subroutine

   subroutine query(extra, status, ierror)
#ifdef MODULE
      use mpi
#else
      include 'mpif.h'
#endif
      integer :: status(MPI_STATUS_SIZE), ierror
      integer(kind=MPI_ADDRESS_KIND) :: extra
      call MPI_Status_set_elements(status, MPI_INTEGER, int(extra), ierror)
      call MPI_Status_set_cancelled(status, .false., ierror)
      status(MPI_SOURCE) = 5
      status(MPI_TAG) = 6
   end subroutine

   subroutine release(extra, ierror)
#ifdef MODULE
      use mpi
#else
      include 'mpif.h'
#endif
      integer :: ierror
      integer(kind=MPI_ADDRESS_KIND) :: extra
      num_freed = num_freed + 1
      ierror = MPI_SUCCESS + 0 * int(extra)
   end subroutine

   subroutine cancel(extra, complete, ierror)
#ifdef MODULE
      use mpi
#else
      include 'mpif.h'
#endif
      integer :: ierror
      integer(kind=MPI_ADDRESS_KIND) :: extra
      logical :: complete
      ierror = MPI_SUCCESS + 0 * int(extra)
      if (complete) ierror = MPI_ERR_OTHER
   end subroutine

   subroutine handle(comm, code)
      integer :: comm, code
      num_freed = num_freed + 1000 + 0 * (comm + code)
   end subroutine
end module

program every_kind
#ifdef MODULE
   use mpi
#endif
   use callbacks
   use iso_c_binding, only: c_int
   implicit none
#ifndef MODULE
   include 'mpif.h'
#endif
   interface
      integer(c_int) function usleep(us) bind(c)
         import c_int
         integer(c_int), value :: us
      end function
   end interface
   integer :: ierr, rank, size, step, steps, pause, slept
   integer(kind=8) :: total
   character(len=20) :: argument
   total = 0
   steps = 1
   if (command_argument_count() > 0) then
      call get_command_argument(1, argument)
      read (argument, *) steps
   end if
   pause = 0
   if (command_argument_count() > 1) then
      call get_command_argument(2, argument)
      read (argument, *) pause
   end if
   call MPI_Init(ierr)
   call MPI_Comm_rank(MPI_COMM_WORLD, rank, ierr)
   call MPI_Comm_size(MPI_COMM_WORLD, size, ierr)
   do step = 1, steps
      if (rank == 0 .and. step == steps) call wait_at_gate()
      call send_and_receive()
      call collect()
      call exchange_typed()
      call attributes()
      call generalized()
      call strings()
      call topology()
      call errors()
      slept = usleep(int(pause, c_int))
   end do
   call MPI_Allreduce(MPI_IN_PLACE, total, 1, MPI_INTEGER8, MPI_SUM, MPI_COMM_WORLD, ierr)
   call MPI_Finalize(ierr)
   if (rank == 0) print '(a,i0)', 'answer ', total

contains
   include 'gate.inc'

   subroutine expect(condition, what)
      logical, intent(in) :: condition
      character(len=*), intent(in) :: what
      integer :: error
      if (condition) return
      print '(a,a,a,i0)', 'wrong: ', what, ' on rank ', rank
      call MPI_Abort(MPI_COMM_WORLD, 3, error)
   end subroutine

   subroutine send_and_receive()
      integer :: numbers(6), got(6), requests(4), statuses(MPI_STATUS_SIZE, 4), status(MPI_STATUS_SIZE)
      integer :: i, index, indices(4), num_ended, count, column, left, right
      logical :: flag
      numbers = [(100 * rank + i, i = 1, 6)]
      left = mod(rank - 1 + size, size)
      right = mod(rank + 1, size)
      call MPI_Sendrecv(numbers, 6, MPI_INTEGER, right, 3, got, 6, MPI_INTEGER, left, 3, MPI_COMM_WORLD, status, ierr)
      call MPI_Get_count(status, MPI_INTEGER, count, ierr)
      call expect(count == 6 .and. status(MPI_SOURCE) == left .and. status(MPI_TAG) == 3, 'Sendrecv')
      total = total + sum(got)
      ! Every second one of six.
      call MPI_Type_vector(3, 1, 2, MPI_INTEGER, column, ierr)
      call MPI_Type_commit(column, ierr)
      got = 0
      call MPI_Irecv(got, 1, column, MPI_ANY_SOURCE, 4, MPI_COMM_WORLD, requests(1), ierr)
      requests(2) = MPI_REQUEST_NULL
      call MPI_Isend(numbers(2), 1, column, right, 4, MPI_COMM_WORLD, requests(3), ierr)
      requests(4) = MPI_REQUEST_NULL
      call MPI_Waitall(4, requests, statuses, ierr)
      call expect(requests(1) == MPI_REQUEST_NULL .and. statuses(MPI_SOURCE, 1) == left, 'Waitall')
      call expect(got(1) == 100 * left + 2 .and. got(3) == 100 * left + 4 .and. got(2) == 0, 'vector')
      call MPI_Type_free(column, ierr)
      call expect(column == MPI_DATATYPE_NULL, 'Type_free')
      ! Indices count from one.
      call MPI_Irecv(got, 6, MPI_INTEGER, left, 5, MPI_COMM_WORLD, requests(2), ierr)
      requests(1) = MPI_REQUEST_NULL
      call MPI_Send(numbers, 6, MPI_INTEGER, right, 5, MPI_COMM_WORLD, ierr)
      call MPI_Waitany(2, requests, index, MPI_STATUS_IGNORE, ierr)
      call expect(index == 2, 'Waitany')
      call MPI_Waitany(2, requests, index, status, ierr)
      ! MPICH 4.0 adds one here, too.
      call expect(index <= MPI_UNDEFINED + 1, 'Waitany of nothing')
      call MPI_Irecv(got, 6, MPI_INTEGER, left, 6, MPI_COMM_WORLD, requests(2), ierr)
      call MPI_Ssend(numbers, 6, MPI_INTEGER, merge(right, MPI_PROC_NULL, .false.), 6, MPI_COMM_WORLD, ierr)
      call MPI_Send(numbers, 6, MPI_INTEGER, right, 6, MPI_COMM_WORLD, ierr)
      call MPI_Waitsome(2, requests, num_ended, indices, MPI_STATUSES_IGNORE, ierr)
      call expect(num_ended == 1 .and. indices(1) == 2, 'Waitsome')
      call MPI_Iprobe(MPI_ANY_SOURCE, 7777, MPI_COMM_WORLD, flag, status, ierr)
      call expect(.not. flag, 'Iprobe')
      call at_bottom(left, right)
      call between_marks()
   end subroutine

   subroutine at_bottom(left, right)
      integer, intent(in) :: left, right
      integer, target, save :: there(2)
      integer :: place, lengths(1), kinds(1)
      integer(kind=MPI_ADDRESS_KIND) :: addresses(1)
      call MPI_Get_address(there, addresses(1), ierr)
      lengths = 2
      kinds = MPI_INTEGER
      call MPI_Type_create_struct(1, lengths, addresses, kinds, place, ierr)
      call MPI_Type_commit(place, ierr)
      there = [rank, 7]
      call MPI_Sendrecv_replace(MPI_BOTTOM, 1, place, right, 8, left, 8, MPI_COMM_WORLD, MPI_STATUS_IGNORE, ierr)
      call expect(there(1) == left .and. there(2) == 7, 'MPI_BOTTOM')
      call MPI_Type_free(place, ierr)
   end subroutine

   ! The bounds of MPI 1, which the headers of Fortran still have.
   subroutine between_marks()
      integer :: marked, lengths(3), kinds(3)
      integer(kind=MPI_ADDRESS_KIND) :: places(3), first, extent
      lengths = 1
      places = [-4, 0, 12]
      kinds = [MPI_LB, MPI_INTEGER, MPI_UB]
      call MPI_Type_create_struct(3, lengths, places, kinds, marked, ierr)
      call MPI_Type_get_extent(marked, first, extent, ierr)
      call expect(first == -4 .and. extent == 16, 'bounds by marks')
      call MPI_Type_free(marked, ierr)
   end subroutine

   ! A datatype for each rank, and for each neighbour on a ring: element i of what a rank gives goes to rank i.
   subroutine exchange_typed()
      integer :: given(0:63), taken(0:63), counts(0:63), places(0:63), types(0:63), ring, request, i
      integer(kind=MPI_ADDRESS_KIND) :: near(0:1)
      given = [(100*rank + i, i = 0, 63)]
      taken = -1
      counts = 1
      places = [(4*i, i = 0, 63)]
      types = MPI_INTEGER
      call MPI_Alltoallw(given, counts, places, types, taken, counts, places, types, MPI_COMM_WORLD, ierr)
      call expect(all_are(taken(0:size - 1) - [(100*i + rank, i = 0, size - 1)], 0), 'Alltoallw')
      taken = given
      call MPI_Ialltoallw(MPI_IN_PLACE, counts, places, types, taken, counts, places, types, MPI_COMM_WORLD, &
                          request, ierr)
      call MPI_Wait(request, MPI_STATUS_IGNORE, ierr)
      call expect(all_are(taken(0:size - 1) - [(100*i + rank, i = 0, size - 1)], 0), 'Ialltoallw in place')
      call MPI_Cart_create(MPI_COMM_WORLD, 1, [size], [.true.], .false., ring, ierr)
      near = [0, 4]
      taken = -1
      call MPI_Neighbor_alltoallw(given, counts, near, types, taken, counts, near, types, ring, ierr)
      i = modulo(rank - 1, size)
      ! With two ranks both neighbours are the same, and what goes down comes from above.
      if (size > 2) call expect(taken(0) == 100*i + 1, 'Neighbor_alltoallw')
      call MPI_Comm_free(ring, ierr)
   end subroutine

   subroutine collect()
      integer :: op, values(3), sums(3), all(0:63), half, i
      logical :: commutes
      values = rank + 1
      call MPI_Op_create(add_and_one, .true., op, ierr)
      call MPI_Allreduce(values, sums, 3, MPI_INTEGER, MPI_MAX, MPI_COMM_WORLD, ierr)
      call expect(all_are(sums, size), 'Allreduce')
      call MPI_Reduce(values, sums, 3, MPI_INTEGER, op, 0, MPI_COMM_WORLD, ierr)
      if (rank == 0) total = total + sums(3)
      call MPI_Op_commutative(op, commutes, ierr)
      call expect(commutes, 'Op_commutative')
      call MPI_Op_free(op, ierr)
      all(rank) = rank * rank
      call MPI_Allgather(MPI_IN_PLACE, 0, MPI_DATATYPE_NULL, all, 1, MPI_INTEGER, MPI_COMM_WORLD, ierr)
      call expect(all_are(all(0:size - 1) - [(i * i, i = 0, size - 1)], 0), 'Allgather in place')
      call MPI_Comm_split(MPI_COMM_WORLD, mod(rank, 2), -rank, half, ierr)
      call MPI_Bcast(values, 3, MPI_INTEGER, 0, half, ierr)
      total = total + values(1)
      call MPI_Comm_free(half, ierr)
      call expect(half == MPI_COMM_NULL, 'Comm_free')
   end subroutine

   logical function all_are(values, value)
      integer, intent(in) :: values(:), value
      all_are = all(values == value)
   end function

   subroutine attributes()
      integer :: keyval, copy, before, old_value
      integer(kind=MPI_ADDRESS_KIND) :: extra, value
      logical :: flag
      before = num_deleted
      call MPI_Comm_get_attr(MPI_COMM_WORLD, MPI_TAG_UB, value, flag, ierr)
      call expect(flag .and. value >= 32767, 'MPI_TAG_UB')
      call MPI_Attr_get(MPI_COMM_WORLD, MPI_TAG_UB, old_value, flag, ierr)
      call expect(flag .and. old_value == value, 'MPI_TAG_UB by the old name')
      extra = 40
      call MPI_Comm_create_keyval(copy_attribute, delete_attribute, keyval, extra, ierr)
      call MPI_Comm_set_attr(MPI_COMM_WORLD, keyval, 2_MPI_ADDRESS_KIND, ierr)
      call MPI_Comm_dup(MPI_COMM_WORLD, copy, ierr)
      call MPI_Comm_get_attr(copy, keyval, value, flag, ierr)
      call expect(flag .and. value == 42, 'attribute of a copy')
      call MPI_Attr_put(copy, keyval, -7, ierr)
      call MPI_Attr_get(copy, keyval, old_value, flag, ierr)
      call expect(flag .and. old_value == -7, 'attribute by the old names')
      call MPI_Comm_free(copy, ierr)
      call MPI_Comm_delete_attr(MPI_COMM_WORLD, keyval, ierr)
      call MPI_Comm_get_attr(MPI_COMM_WORLD, keyval, value, flag, ierr)
      call expect(.not. flag .and. num_deleted == before + 3, 'deleted attribute')
      call MPI_Comm_free_keyval(keyval, ierr)
      call expect(keyval == MPI_KEYVAL_INVALID, 'Comm_free_keyval')
   end subroutine

   subroutine generalized()
      integer :: request, status(MPI_STATUS_SIZE), count, before
      integer(kind=MPI_ADDRESS_KIND) :: extra
      before = num_freed
      extra = 9
      call MPI_Grequest_start(query, release, cancel, extra, request, ierr)
      call MPI_Cancel(request, ierr)
      call expect(ierr == MPI_SUCCESS, 'Cancel')
      call MPI_Grequest_complete(request, ierr)
      call MPI_Wait(request, status, ierr)
      call MPI_Get_count(status, MPI_INTEGER, count, ierr)
      call expect(count == 9 .and. status(MPI_SOURCE) == 5 .and. num_freed == before + 1, 'Grequest')
   end subroutine

   subroutine strings()
      character(len=MPI_MAX_PROCESSOR_NAME) :: name
      character(len=10) :: short
      integer :: length, comm, info, keys
      logical :: flag
      call MPI_Get_processor_name(name, length, ierr)
      call expect(length > 0 .and. len_trim(name) == length, 'Get_processor_name')
      call MPI_Comm_dup(MPI_COMM_SELF, comm, ierr)
      call MPI_Comm_set_name(comm, '  a name   ', ierr)
      call MPI_Comm_get_name(comm, name, length, ierr)
      call expect(trim(adjustl(name)) == 'a name', 'Comm_get_name')
      call MPI_Comm_free(comm, ierr)
      call MPI_Info_create(info, ierr)
      call MPI_Info_set(info, 'key ', ' value ', ierr)
      call MPI_Info_get(info, 'key', 10, short, flag, ierr)
      call expect(flag .and. short == 'value', 'Info_get')
      call MPI_Info_get(info, 'none', 10, short, flag, ierr)
      call MPI_Info_get_nkeys(info, keys, ierr)
      call expect(.not. flag .and. keys == 1, 'Info_get_nkeys')
      call MPI_Info_free(info, ierr)
   end subroutine

   subroutine topology()
      integer :: grid, dims(1), coords(1), source, dest
      logical :: periods(1), got(1)
      dims = size
      periods = .true.
      call MPI_Cart_create(MPI_COMM_WORLD, 1, dims, periods, .false., grid, ierr)
      call MPI_Cart_shift(grid, 0, 1, source, dest, ierr)
      call expect(dest == mod(rank + 1, size), 'Cart_shift')
      call MPI_Cart_get(grid, 1, dims, got, coords, ierr)
      call expect(got(1) .and. coords(1) == rank .and. dims(1) == size, 'Cart_get')
      call MPI_Comm_free(grid, ierr)
   end subroutine

   subroutine errors()
      integer :: handler, comm, before, error_class, length
      character(len=MPI_MAX_ERROR_STRING) :: text
      before = num_freed
      call MPI_Comm_dup(MPI_COMM_SELF, comm, ierr)
      call MPI_Comm_create_errhandler(handle, handler, ierr)
      call MPI_Comm_set_errhandler(comm, handler, ierr)
      call MPI_Send(before, 1, MPI_INTEGER, 99, 0, comm, ierr)
      call MPI_Error_class(ierr, error_class, ierr)
      call expect(error_class == MPI_ERR_RANK .and. num_freed == before + 1000, 'error handler')
      num_freed = before
      call MPI_Error_string(MPI_ERR_RANK, text, length, ierr)
      call expect(length > 0, 'Error_string')
      call MPI_Errhandler_free(handler, ierr)
      call MPI_Comm_free(comm, ierr)
   end subroutine
end program
