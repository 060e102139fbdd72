! Images of Fortran, each a rank: puts and gets, events, locks, atomic variables, teams of values that grow: `images STEPS`.
program images
  use, intrinsic :: iso_fortran_env
  implicit none
  type :: bag
    real(real64), allocatable :: values(:)
  end type
  integer, parameter :: n = 64
  real(real64) :: field(n)[*], total
  integer(atomic_int_kind) :: counter[*]
  type(event_type) :: full[*]
  type(lock_type) :: guard[*]
  type(bag) :: sack[*]
  integer :: shared[*], grid(8, 8)[*]
  integer :: me, num, step, steps, left, right, old, i
  integer(int64) :: answer
  character(20) :: word
  me = this_image(); num = num_images()
  right = merge(1, me + 1, me == num); left = merge(num, me - 1, me == 1)
  call get_command_argument(1, word); read (word, *) steps
  field = [(real(me * i, real64), i = 1, n)]
  allocate (sack%values(4)); sack%values = me
  shared = 0; grid = me; answer = 0
  call atomic_define(counter, 0)
  sync all
  do step = 1, steps
    field(1)[right] = field(n - 1) + step              ! a put
    grid(2:8:3, 3)[left] = step + [(i, i = 1, 3)]      ! a strided one
    sync all
    field(n) = field(2)[left] * 0.5_real64             ! a get
    answer = answer + sum(grid(2:8:3, 3))
    call atomic_fetch_add(counter[1], me, old)
    lock (guard[1])
    shared[1] = shared[1] + me
    unlock (guard[1])
    event post (full[right])
    event wait (full)
    critical
      shared[num] = shared[num] + 1
    end critical
    sync images ([left, right])
    field(3:n - 2) = (field(2:n - 3) + field(4:n - 1)) * 0.5_real64
    if (mod(step, 5) == 0) then
      deallocate (sack%values); allocate (sack%values(4 + mod(step, 3))); sack%values = me * step
      sync all
      answer = answer + nint(sum(sack[right]%values), int64)
      sync all
    end if
    total = sum(field)
    call co_sum(total)
    answer = mod(answer * 31 + nint(total, int64), 1000000007_int64)
  end do
  sync all
  if (me == 1) then
    call atomic_ref(old, counter)
    print '(a, 4(1x, i0))', 'answer', answer, old, shared, shared[num]
  end if
end program
