"""The process that runs programs: allocator, compiler options, compilation cache, concurrency."""
