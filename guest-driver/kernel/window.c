// SPDX-License-Identifier: GPL-2.0
/*
 * Virtio ISM driver: slabs of the window, and own DMBs in them.
 *
 * A slab has page structures, since SMC takes the page of a DMB.
 */
#include <linux/delay.h>
#include <linux/log2.h>
#include <linux/mm.h>
#include <linux/module.h>
#include <linux/rculist.h>
#include <linux/slab.h>
#include <linux/virtio_config.h>

#include "window.h"

/* Page structures are made of pieces of memory that are so long. */
#define VISM_PIECE		SZ_2M
/* Longest slab that is believed in, and number of slabs. */
#define VISM_MAX_SLAB		SZ_128M
#define VISM_MAX_SLABS		1024
/* A front end may answer before a mapping can be seen. */
#define VISM_NONCE_MS		1000
/* How often a line is looked at again before that is left to the next look. */
#define VISM_LOOKS		64
/* A slab that was looked at so often in vain is left to kicks. */
#define VISM_VAIN_POLLS		8
/* How long a removal waits for readers of pages, and how often it looks. */
#define VISM_EXIT_MS		5000
#define VISM_EXIT_LOOK_MS	100
/* No entry of a line's table. */
#define VISM_NO_IDX		U32_MAX

static bool vism_use_window = true;
module_param_named(window, vism_use_window, bool, 0444);
MODULE_PARM_DESC(window, "store into DMBs of peers (default), or have the device copy");

static unsigned int vism_poll_us = 50;
module_param_named(poll_us, vism_poll_us, uint, 0644);
MODULE_PARM_DESC(poll_us, "look at busy peers that often instead of being woken; 0: never");

/**
 * struct vism_own_line - a signal line with own DMBs
 * @list: in &vism_slab.lines
 * @memory: the line in the slab
 * @number: of the line in the slab
 * @dmbs: number of DMBs
 * @idx: DMBs by bit
 */
struct vism_own_line {
	struct list_head list;
	struct virtio_ism_line *memory;
	u16 number;
	unsigned int dmbs;
	u32 idx[64];
};

/* Owner: takes the bits of DMBs with data. */
static u64 vism_line_take(struct virtio_ism_line *line)
{
	u64 *pend = (u64 __force *)&line->pend;

	if (!READ_ONCE(*pend))
		return 0;
	return le64_to_cpu((__le64 __force)xchg(pend, 0));
}

/* Owner: has users kick from now on. Bits that are set by then have to be looked for. */
static void vism_line_arm(struct virtio_ism_line *line)
{
	vism_set_bit(0, &line->armed);
	/* Before the look at pending bits; the partner is in vism_line_raise(). */
	virt_mb();
}

/* Judges a place. Nothing is said of the memory yet. */
static int vism_judge_place(struct vism *ism, const struct vism_place *place)
{
	u64 data = place->slab_len - VIRTIO_ISM_CONTROL_LEN;
	u64 at = place->dmb_off - place->slab_off;

	if (place->slab_len <= VIRTIO_ISM_CONTROL_LEN ||
	    place->slab_len > VISM_MAX_SLAB ||
	    !IS_ALIGNED(place->slab_len, SZ_64K) ||
	    !IS_ALIGNED(place->slab_off, ism->limits.slab_align) ||
	    place->slab_off > ism->window.len ||
	    ALIGN(place->slab_len, VISM_PIECE) > ism->window.len - place->slab_off ||
	    place->dmb_off < place->slab_off || at > data ||
	    place->dmb_len > data - at || !PAGE_ALIGNED(at) ||
	    place->line >= VIRTIO_ISM_LINES || place->bit >= 64)
		return -EPROTO;
	return 0;
}

static struct vism_slab *vism_find_slab(struct vism *ism, u32 id)
{
	struct vism_slab *slab;

	list_for_each_entry(slab, &ism->window.slabs, list)
		if (slab->id == id && !slab->stale)
			return slab;
	return NULL;
}

/* Gives a slab page structures, and waits until the front end has mapped it. */
static struct vism_slab *vism_map_slab(struct vism *ism, const struct vism_place *place,
				       const uuid_t *peer)
{
	struct vism_slab *slab, *other;
	unsigned int nslabs = 0;
	const __le64 *nonce;
	int rc;

	list_for_each_entry(other, &ism->window.slabs, list) {
		nslabs++;
		/* One of an earlier session may still be mapped there. */
		if (place->slab_off < other->off + ALIGN(other->len, VISM_PIECE) &&
		    other->off < place->slab_off + ALIGN(place->slab_len, VISM_PIECE))
			return ERR_PTR(other->stale ? -EBUSY : -EPROTO);
	}
	if (nslabs >= VISM_MAX_SLABS)
		return ERR_PTR(-ENOSPC);
	slab = kzalloc_obj(*slab);
	if (!slab)
		return ERR_PTR(-ENOMEM);
	INIT_LIST_HEAD(&slab->lines);
	slab->id = place->slab_id;
	slab->off = place->slab_off;
	slab->len = place->slab_len;
	slab->peer = *peer;
	slab->pgmap.type = MEMORY_DEVICE_GENERIC;
	slab->pgmap.nr_range = 1;
	slab->pgmap.range.start = ism->window.base + slab->off;
	slab->pgmap.range.end = slab->pgmap.range.start +
				ALIGN(slab->len, VISM_PIECE) - 1;
	slab->addr = memremap_pages(&slab->pgmap, dev_to_node(&ism->vdev->dev));
	if (IS_ERR(slab->addr)) {
		rc = PTR_ERR(slab->addr);
		goto free;
	}
	nonce = slab->addr + slab->len - VIRTIO_ISM_CONTROL_LEN;
	for (int i = 0; READ_ONCE(*nonce) != place->nonce; i++) {
		if (i == VISM_NONCE_MS || !vism_usable(ism)) {
			rc = -ENXIO;
			goto unmap;
		}
		fsleep(USEC_PER_MSEC);
	}
	scoped_guard(spinlock_irqsave, &ism->dmb_lock) {
		/* The peer may have gone before this. */
		slab->orphan = vism_has_left(ism, peer);
		list_add_tail(&slab->list, &ism->window.slabs);
	}
	return slab;
unmap:
	memunmap_pages(&slab->pgmap);
free:
	kfree(slab);
	return ERR_PTR(rc);
}

/**
 * vism_get_slab() - the slab of a place, with one more user
 * @ism: device, whose window is locked
 * @place: as the device says; it is judged here
 * @peer: the other one, to whom the slab must belong
 *
 * Context: process; sleeps.
 * Return: the slab, which is mapped, or an error. -EPROTO: what the device says cannot be.
 */
struct vism_slab *vism_get_slab(struct vism *ism, const struct vism_place *place,
				const uuid_t *peer)
{
	struct vism_slab *slab;
	int rc;

	lockdep_assert_held(&ism->window.mutex);
	rc = vism_judge_place(ism, place);
	if (rc)
		return ERR_PTR(rc);
	slab = vism_find_slab(ism, place->slab_id);
	if (!slab)
		slab = vism_map_slab(ism, place, peer);
	else if (slab->off != place->slab_off || slab->len != place->slab_len ||
		 !uuid_equal(&slab->peer, peer))
		return ERR_PTR(-EPROTO);
	if (!IS_ERR(slab))
		slab->users++;
	return slab;
}

/* Whether somebody has taken a page, as splice() does. */
static bool vism_has_readers(const void *addr, size_t len)
{
	for (size_t at = 0; at < len; at += PAGE_SIZE)
		if (page_ref_count(virt_to_page(addr + at)) > 1)
			return true;
	return false;
}

/* Unmaps a slab that nobody uses any more, and returns it to the device. */
static void vism_drop_slab(struct vism *ism, struct vism_slab *slab)
{
	struct virtio_ism_release_slab request = { .slab_id = cpu_to_le32(slab->id) };

	lockdep_assert_held(&ism->window.mutex);
	scoped_guard(spinlock_irqsave, &ism->dmb_lock)
		list_del(&slab->list);
	memunmap_pages(&slab->pgmap);
	if (!slab->stale)
		vism_command(ism, VIRTIO_ISM_OP_RELEASE_SLAB, &request,
			     sizeof(request), NULL, 0);
	kfree(slab);
}

/**
 * vism_put_slab() - end a use of a slab
 * @ism: device, whose window is locked
 * @slab: its use that vism_get_slab() has begun
 */
void vism_put_slab(struct vism *ism, struct vism_slab *slab)
{
	lockdep_assert_held(&ism->window.mutex);
	slab->users--;
	if (!slab->users && (slab->stale || slab->orphan))
		vism_drop_slab(ism, slab);
}

/* Tells clients of the DMBs of a line what was signalled. */
static void vism_signal_bits(struct vism *ism, const struct vism_own_line *line, u64 bits)
{
	unsigned int bit;

	while (bits) {
		bit = __ffs64(bits);
		bits &= bits - 1;
		if (line->idx[bit] == VISM_NO_IDX)
			continue;
		atomic64_inc(&ism->window.signals);
		vism_call_irq(ism->dibs, line->idx[bit], VISM_FIRST_MASK);
	}
}

/* Takes what users have announced in a slab. Returns whether there was anything. */
static bool vism_take_slab(struct vism *ism, struct vism_slab *slab)
{
	struct vism_own_line *line;
	bool news = false;
	u64 bits;

	lockdep_assert_held(&ism->dmb_lock);
	list_for_each_entry(line, &slab->lines, list) {
		bits = vism_line_take(line->memory);
		if (!bits)
			continue;
		news = true;
		vism_signal_bits(ism, line, bits);
	}
	return news;
}

/* Has users of a slab kick from now on, and takes what they announced before. */
static void vism_arm_slab(struct vism *ism, struct vism_slab *slab)
{
	struct vism_own_line *line;

	lockdep_assert_held(&ism->dmb_lock);
	slab->busy = false;
	list_for_each_entry(line, &slab->lines, list) {
		for (int i = 0; i < VISM_LOOKS; i++) {
			vism_line_arm(line->memory);
			if (!READ_ONCE(line->memory->pend))
				break;
			vism_signal_bits(ism, line, vism_line_take(line->memory));
		}
	}
}

/* Looks at a slab. One with news is looked at again soon, and meanwhile its user does not kick. */
static void vism_look_at(struct vism *ism, struct vism_slab *slab)
{
	lockdep_assert_held(&ism->dmb_lock);
	if (!ism->dibs)
		return;
	guard(spinlock)(&ism->dibs->lock);
	if (!vism_take_slab(ism, slab) || !vism_poll_us) {
		vism_arm_slab(ism, slab);
		return;
	}
	slab->vain = 0;
	slab->busy = true;
	if (!hrtimer_is_queued(&ism->window.poll))
		hrtimer_start(&ism->window.poll, us_to_ktime(vism_poll_us),
			      HRTIMER_MODE_REL);
}

/* Looks at slabs that had news lately. */
static enum hrtimer_restart vism_poll(struct hrtimer *timer)
{
	struct vism *ism = container_of(timer, struct vism, window.poll);
	struct vism_slab *slab;
	bool busy = false;

	guard(spinlock_irqsave)(&ism->dmb_lock);
	/* It may have been started again before the lock was free. */
	if (!ism->dibs || !vism_usable(ism) || hrtimer_is_queued(timer))
		return HRTIMER_NORESTART;
	guard(spinlock)(&ism->dibs->lock);
	list_for_each_entry(slab, &ism->window.slabs, list) {
		if (!slab->busy)
			continue;
		if (vism_take_slab(ism, slab))
			slab->vain = 0;
		else if (++slab->vain >= VISM_VAIN_POLLS)
			vism_arm_slab(ism, slab);
		busy |= slab->busy;
	}
	if (!busy)
		return HRTIMER_NORESTART;
	hrtimer_forward_now(timer, us_to_ktime(vism_poll_us));
	return HRTIMER_RESTART;
}

/**
 * vism_window_wake() - look at a slab whose user has kicked
 * @ism: device
 * @id: of the slab, as the device says
 *
 * Context: any.
 */
void vism_window_wake(struct vism *ism, u32 id)
{
	struct vism_slab *slab;

	guard(spinlock_irqsave)(&ism->dmb_lock);
	slab = vism_find_slab(ism, id);
	if (slab)
		vism_look_at(ism, slab);
}

static void vism_free_held(struct vism *ism)
{
	struct vism_window *window = &ism->window;
	struct vism_dmb *dmb, *next;

	guard(mutex)(&window->mutex);
	list_for_each_entry_safe(dmb, next, &window->held, list) {
		if (vism_has_readers(dmb->addr, dmb->len))
			continue;
		list_del(&dmb->list);
		if (!dmb->slab->stale)
			vism_unregister(ism, dmb->token);
		clear_bit(dmb->idx, ism->idx_map);
		vism_put_slab(ism, dmb->slab);
		kfree(dmb);
	}
}

/* A wake-up may be lost if a peer does not play by the rules. */
static void vism_look(struct work_struct *work)
{
	struct vism *ism = container_of(work, struct vism, window.look.work);
	struct vism_slab *slab;

	scoped_guard(spinlock_irqsave, &ism->dmb_lock)
		list_for_each_entry(slab, &ism->window.slabs, list)
			if (!slab->stale && !slab->busy)
				vism_look_at(ism, slab);
	vism_forget_unattached(ism);
	vism_free_held(ism);
	queue_delayed_work(system_dfl_wq, &ism->window.look, HZ);
}

/* Takes a bit of a line for an own DMB. */
static int vism_add_to_line(struct vism *ism, struct vism_dmb *dmb)
{
	struct vism_own_line *line, *fresh;

	fresh = kzalloc_obj(*fresh);
	if (!fresh)
		return -ENOMEM;
	fresh->memory = vism_line_at(dmb->slab, dmb->line);
	fresh->number = dmb->line;
	memset(fresh->idx, 0xff, sizeof(fresh->idx));
	scoped_guard(spinlock_irqsave, &ism->dmb_lock) {
		list_for_each_entry(line, &dmb->slab->lines, list)
			if (line->number == dmb->line)
				goto found;
		line = fresh;
		fresh = NULL;
		list_add(&line->list, &dmb->slab->lines);
found:
		if (line->idx[dmb->bit] != VISM_NO_IDX) {
			kfree(fresh);
			return -EPROTO;
		}
		line->idx[dmb->bit] = dmb->idx;
		line->dmbs++;
		/* The first data will be announced by a kick. */
		vism_line_arm(line->memory);
	}
	kfree(fresh);
	return 0;
}

static void vism_take_from_line(struct vism *ism, struct vism_dmb *dmb)
{
	struct vism_own_line *line, *done = NULL;

	scoped_guard(spinlock_irqsave, &ism->dmb_lock) {
		list_for_each_entry(line, &dmb->slab->lines, list) {
			if (line->number != dmb->line)
				continue;
			line->idx[dmb->bit] = VISM_NO_IDX;
			if (!--line->dmbs) {
				list_del(&line->list);
				done = line;
			}
			break;
		}
	}
	kfree(done);
}

/**
 * vism_window_register() - register a DMB in a slab
 * @ism: device
 * @dmb: its user, length and index; the rest is filled in
 *
 * Return: 0 or an error number. Then the DMB may be registered in guest memory, unless the device
 * has failed.
 */
int vism_window_register(struct vism *ism, struct vism_dmb *dmb)
{
	struct virtio_ism_register request = {
		.idx = cpu_to_le32(dmb->idx),
		.len = cpu_to_le32(dmb->len),
		.backing = cpu_to_le16(VIRTIO_ISM_BACKING_WINDOW),
	};
	struct virtio_ism_register_reply reply;
	struct vism_place place;
	int rc;

	if (!ism->window.len)
		return -EOPNOTSUPP;
	export_uuid(request.user_gid, &dmb->user);
	/* Nobody returns the slab to the device between the reply and the look at it. */
	guard(mutex)(&ism->window.mutex);
	rc = vism_command(ism, VIRTIO_ISM_OP_REGISTER, &request,
			  sizeof(request), &reply, sizeof(reply));
	if (rc)
		return rc;
	place = (struct vism_place) {
		.dmb_off = le64_to_cpu(reply.dmb_off),
		.slab_off = le64_to_cpu(reply.slab_off),
		.slab_len = le32_to_cpu(reply.slab_len),
		.slab_id = le32_to_cpu(reply.slab_id),
		.dmb_len = dmb->len,
		.line = le16_to_cpu(reply.line),
		.bit = reply.bit,
		.nonce = reply.nonce,
	};
	dmb->token = le64_to_cpu(reply.token);
	dmb->slab = vism_get_slab(ism, &place, &dmb->user);
	if (IS_ERR(dmb->slab)) {
		rc = PTR_ERR(dmb->slab);
		goto unregister;
	}
	dmb->addr = dmb->slab->addr + (place.dmb_off - place.slab_off);
	dmb->line = place.line;
	dmb->bit = place.bit;
	rc = dmb->token ? vism_add_to_line(ism, dmb) : -EPROTO;
	if (!rc)
		return 0;
	vism_put_slab(ism, dmb->slab);
unregister:
	dmb->slab = NULL;
	vism_unregister(ism, dmb->token);
	if (rc == -EPROTO)
		vism_fail(ism, "a DMB in a place that cannot be");
	return rc;
}

/**
 * vism_window_unregister() - end a DMB in a slab
 * @ism: device
 * @dmb: a DMB that is in no list; it is freed, at the latest when nobody reads its pages
 */
void vism_window_unregister(struct vism *ism, struct vism_dmb *dmb)
{
	vism_take_from_line(ism, dmb);
	scoped_guard(mutex, &ism->window.mutex)
		list_add(&dmb->list, &ism->window.held);
	vism_free_held(ism);
}

/**
 * vism_drop_orphans() - return slabs of peers that have gone
 * @ism: device
 */
void vism_drop_orphans(struct vism *ism)
{
	struct vism_slab *slab, *next;

	guard(mutex)(&ism->window.mutex);
	list_for_each_entry_safe(slab, next, &ism->window.slabs, list)
		if (slab->orphan && !slab->users)
			vism_drop_slab(ism, slab);
}

/**
 * vism_window_open() - use the window, if there is one
 * @ism: device, whose limits are known
 */
void vism_window_open(struct vism *ism)
{
	const struct vism_limits *limits = &ism->limits;
	struct virtio_shm_region region;

	ism->window.len = 0;
	if (!vism_use_window || !limits->window_size ||
	    !vism_has_feature(ism, VIRTIO_ISM_F_WINDOW))
		return;
	if (!virtio_get_shm_region(ism->vdev, &region, VIRTIO_ISM_SHM_WINDOW) ||
	    region.len != limits->window_size || !is_power_of_2(region.len) ||
	    !IS_ALIGNED(region.addr, VISM_PIECE) || !limits->slab_align ||
	    !IS_ALIGNED(limits->slab_align, VISM_PIECE)) {
		dev_warn(&ism->vdev->dev, "the window cannot be used\n");
		return;
	}
	ism->window.base = region.addr;
	ism->window.len = region.len;
	queue_delayed_work(system_dfl_wq, &ism->window.look, HZ);
}

/**
 * vism_window_close() - forget what was of a session
 * @ism: device, which was reset
 *
 * Slabs with DMBs that clients have not given back stay mapped until they do.
 */
void vism_window_close(struct vism *ism)
{
	struct vism_slab *slab, *next;

	cancel_delayed_work_sync(&ism->window.look);
	cancel_work_sync(&ism->window.work);
	hrtimer_cancel(&ism->window.poll);
	scoped_guard(mutex, &ism->window.mutex) {
		guard(spinlock_irqsave)(&ism->dmb_lock);
		list_for_each_entry(slab, &ism->window.slabs, list)
			slab->stale = true;
	}
	vism_detach_all(ism);
	guard(mutex)(&ism->window.mutex);
	list_for_each_entry_safe(slab, next, &ism->window.slabs, list)
		if (!slab->users)
			vism_drop_slab(ism, slab);
	ism->window.len = 0;
}

/**
 * vism_window_exit() - wait until nobody reads own DMBs
 * @ism: device, which was reset, and has no clients
 *
 * A program can keep pages for as long as it likes, in a pipe for example. Their slabs stay mapped
 * after a while, with their page structures, until the machine is started again: the last put of a
 * page needs both.
 */
void vism_window_exit(struct vism *ism)
{
	struct vism_window *window = &ism->window;
	struct vism_slab *slab, *next_slab;
	struct vism_dmb *dmb, *next;

	for (int i = 0; i < VISM_EXIT_MS / VISM_EXIT_LOOK_MS; i++) {
		vism_free_held(ism);
		if (list_empty(&window->slabs))
			return;
		fsleep(VISM_EXIT_LOOK_MS * USEC_PER_MSEC);
	}
	dev_warn(&ism->vdev->dev, "pages of DMBs are in use, and stay\n");
	guard(mutex)(&window->mutex);
	list_for_each_entry_safe(dmb, next, &window->held, list) {
		list_del(&dmb->list);
		kfree(dmb);
	}
	list_for_each_entry_safe(slab, next_slab, &window->slabs, list)
		list_del_init(&slab->list);
}

/**
 * vism_window_init() - prepare what windows need
 * @ism: device
 */
void vism_window_init(struct vism *ism)
{
	struct vism_window *window = &ism->window;

	mutex_init(&window->mutex);
	INIT_LIST_HEAD(&window->slabs);
	INIT_LIST_HEAD(&window->held);
	hash_init(window->peers);
	INIT_WORK(&window->work, vism_peer_work);
	hrtimer_setup(&window->poll, vism_poll, CLOCK_MONOTONIC, HRTIMER_MODE_REL);
	INIT_DELAYED_WORK(&window->look, vism_look);
}
