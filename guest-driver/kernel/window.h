/* SPDX-License-Identifier: GPL-2.0 */
/*
 * Virtio ISM driver: what the files of the window share.
 *
 * A slab is memory of one owner and one user, mapped into the windows of both. Own DMBs lie in
 * slabs where the device can map them; into a peer's DMB this driver then stores by itself.
 *
 * A signal line announces data. Its owner arms it when it has nothing to do, and only then the user
 * kicks. Both words of a line are memory that a peer can write at any time: the worst it can do by
 * that is to wake for nothing, or not to wake. The driver looks again within a second.
 */
#ifndef _VISM_WINDOW_H
#define _VISM_WINDOW_H

#include <linux/memremap.h>
#include <asm/barrier.h>
#ifdef CONFIG_X86
#include <asm/sync_bitops.h>
#endif

#include "vism.h"

/**
 * struct vism_slab - a slab that is mapped
 * @list: in &vism_window.slabs
 * @pgmap: its page structures
 * @addr: where it is mapped
 * @off: its place in the window
 * @len: its length, with the control tail
 * @id: its number on this device
 * @peer: the other one
 * @users: number of own DMBs and of attached ones in it
 * @orphan: its peer has gone
 * @stale: it is of an earlier session
 * @busy: it is polled, and its lines are not armed
 * @vain: how often it was polled in vain
 * @lines: lines with own DMBs, guarded by &vism.dmb_lock
 */
struct vism_slab {
	struct list_head list;
	struct dev_pagemap pgmap;
	void *addr;
	u64 off;
	u32 len;
	u32 id;
	uuid_t peer;
	unsigned int users;
	bool orphan;
	bool stale;
	bool busy;
	unsigned int vain;
	struct list_head lines;
};

/**
 * struct vism_place - where a reply places a DMB; all of it is the device's word
 * @dmb_off: of the DMB in the window
 * @slab_off: of the slab in the window
 * @slab_len: length of the slab
 * @slab_id: number of the slab on this device
 * @dmb_len: length of the DMB
 * @line: signal line of the DMB
 * @bit: its bit of the line
 * @nonce: what the control tail must say
 */
struct vism_place {
	u64 dmb_off;
	u64 slab_off;
	u32 slab_len;
	u32 slab_id;
	u32 dmb_len;
	u16 line;
	u8 bit;
	__le64 nonce;
};

/*
 * The other side of these words is another machine. With one processor, x86 drops the lock of an
 * ordinary atomic operation.
 */
static inline void vism_set_bit(unsigned int bit, void *word)
{
#ifdef CONFIG_X86
	sync_set_bit(bit, word);
#else
	atomic64_or((s64 __force)cpu_to_le64(BIT_ULL(bit)), word);
#endif
}

static inline struct virtio_ism_line *
vism_line_at(const struct vism_slab *slab, u16 line)
{
	void *tail = slab->addr + slab->len - VIRTIO_ISM_CONTROL_LEN;

	return tail + sizeof(struct virtio_ism_line) * (line + 1);
}

/* window.c */
struct vism_slab *vism_get_slab(struct vism *ism, const struct vism_place *place,
				const uuid_t *peer);
void vism_put_slab(struct vism *ism, struct vism_slab *slab);
void vism_drop_orphans(struct vism *ism);

/* peer.c */
void vism_forget_unattached(struct vism *ism);
void vism_detach_all(struct vism *ism);
void vism_peer_work(struct work_struct *work);

#endif /* _VISM_WINDOW_H */
